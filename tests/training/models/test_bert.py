"""Networks of transformers by their configuration: positions may be numbered from above padding."""

import json

import pytest
import torch
import transformers

from torch_thor.errors import UserError
from torch_thor.training.models.bert import BERTS, build

LENGTH, VOCABULARY, PAD = 32, 99, 3
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2,
}  # fmt: skip
FROM_ZERO, ABOVE_PADDING = ["bert", "distilbert"], ["roberta", "camembert"]


def made(folder, kind, positions):
    file = folder / f"{positions}.json"
    file.write_text(json.dumps({**SIZES, "model_type": kind, "max_position_embeddings": positions}))
    return build(str(file), VOCABULARY, LENGTH, PAD)


@pytest.mark.parametrize("kind", [*FROM_ZERO, *ABOVE_PADDING])
def test_positions_must_reach_as_far_as_the_tokens(tmp_path, kind):
    first, said = 0, f"max_position_embeddings to {LENGTH} or more"
    if kind in ABOVE_PADDING:
        first, said = PAD + 1, f"count from above padding, {LENGTH + PAD + 1}"
    with pytest.raises(UserError, match=said):
        made(tmp_path, kind, LENGTH + first - 1)
    model, tokens = made(tmp_path, kind, LENGTH + first), torch.randint(5, VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        found = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert found.logits.shape == (2, LENGTH, VOCABULARY)


def test_bert_with_and_without_next_sentence_prediction(monkeypatch):
    monkeypatch.setitem(BERTS, "bert-tiny", (1, 32, 2, 64))
    for pairs, kind in (
        (True, transformers.BertForPreTraining),
        (False, transformers.BertForMaskedLM),
    ):
        model = build("bert-tiny", VOCABULARY, 600, PAD, next_sentence=pairs)
        assert type(model) is kind
        assert model.config.max_position_embeddings == 600
        assert pairs == any(getattr(layer, "out_features", 0) == 2 for layer in model.modules())
