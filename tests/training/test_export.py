"""Exporting a trained network: transformers reads it and computes the same."""

import io
import json

import pytest
import torch
from rich.console import Console

from torch_thor.training.checkpoint import find_checkpoints, load_weights
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipes import load_recipe
from torch_thor.training.run import export, run_recipe
from torch_thor.training.tasks.opening import open_task

WORDS = (
    "data.text.vocab_size=300 data.text.length=32 batch_size=4 device=cpu steps=2 eval_interval=2 "
    "ema_decay=0.5 optimizer=thor,sgd targets=[]"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps with two optimizers, and averages."""
    folder = tmp_path_factory.mktemp("run")
    recipe = load_recipe("bert-tiny", [*WORDS.split(" "), f"data.root={folder / 'cache'}"])
    run_recipe(recipe, RunFolder(folder / "run"), Console(file=io.StringIO()))
    return folder / "run", recipe


@pytest.mark.parametrize("averaged", [False, True])
def test_transformers_reads_what_was_trained(run, tmp_path, averaged):
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    folder, recipe = run
    said, out = [], tmp_path / "out" / "bert"
    export(folder / "thor", out, said.append, averaged=averaged)
    assert said == [f"thor, step 2: written to {out}"]
    # a name that transformers 4 knows too
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    model = open_task(recipe, torch.device("cpu"), pytest.fail, train=False).model().eval()
    saved = find_checkpoints(folder / "thor", pytest.fail)[0]
    load_weights(model, saved.weights(averaged), "the test")
    tokenizer = AutoTokenizer.from_pretrained(out)
    texts = ["The sequence of statements."], ["An object is returned."]
    batch = tokenizer(*texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = AutoModelForMaskedLM.from_pretrained(out)(**batch).logits
        assert logits.equal(model(**batch).prediction_logits)
        hidden = AutoModel.from_pretrained(out)(**batch).last_hidden_state
        assert hidden.equal(model.bert(**batch).last_hidden_state)
    assert tokenizer.model_max_length == 32
    assert batch["token_type_ids"][0, [0, -1]].tolist() == [0, 1]
    assert tokenizer.mask_token_id in tokenizer("It is not a [MASK].")["input_ids"]
    decoded = tokenizer.decode(batch["input_ids"][0])
    assert decoded.startswith("[CLS] the sequence of statements. [SEP] an object")
