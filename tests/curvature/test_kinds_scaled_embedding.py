"""Embeddings that multiply what they look up by a number, as Gemma's and BART's do."""

import importlib
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, Gemma2Config, Gemma2ForCausalLM
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextScaledWordEmbedding

from comparing import assert_matches_reference, compare
from tiny import cross_entropy
from torch_thor import THOR

KINDS = (GemmaTextScaledWordEmbedding, BartScaledWordEmbedding)


def test_factors():
    """g is that of the vector, scale times the output's; A counts tokens as before."""
    for kind, split_dim, padding_idx in product(KINDS, (None, 3), (None, 2)):
        model = nn.Sequential(kind(7, 4, padding_idx, embed_scale=3.5), nn.Tanh(), nn.Linear(4, 3)).double()
        x = torch.randint(7, (3, 4))
        assert_matches_reference(model, x, lambda y: (y**3).sum() / 3, terms=3, split_dim=split_dim)


class Tied(nn.Module):
    """Scaled on the way in, plain on the way out, as Gemma has it."""

    def __init__(self):
        super().__init__()
        self.embedding = GemmaTextScaledWordEmbedding(7, 4, None, embed_scale=2.0)
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.parts(x)[0]

    def parts(self, x):
        e = self.embedding(x)
        y = self.decoder(torch.tanh(e))
        return y, [("embedding", x, e)]


def test_steps_of_a_tied_one():
    stream = [(torch.randint(7, (5, 3)), cross_entropy(torch.randint(7, (5, 3)))) for _ in range(10)]
    compare(
        Tied().double(),
        stream,
        forward=lambda model, x: model.parts(x),
        reference_options={"preconditioned": ["embedding"]},
        update_interval=3,
    )


def test_a_plain_embedding_of_scaled_vectors_takes_the_same_steps():
    """Scale 2 with vectors v is scale 1 with vectors 2 v: g twice as large for a weight half as large."""
    scaled = nn.Sequential(BartScaledWordEmbedding(7, 4, None, embed_scale=2.0), nn.Linear(4, 3)).double()
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        plain[0].weight.mul_(2)
    x, labels = torch.randint(7, (5, 3)), torch.randint(3, (5, 3))
    for model in (scaled, plain):
        optimizer = THOR(model, lr=0.0)
        cross_entropy(labels)(model(x)).backward()
        optimizer.step()
        model.curvature = optimizer.curvature["0"]
    torch.testing.assert_close(scaled.curvature.factors()[1], 4 * plain.curvature.factors()[1])
    torch.testing.assert_close(scaled.curvature.factors()[0], plain.curvature.factors()[0])


class AlsoShifted(BartScaledWordEmbedding):
    """Scaled, and something else."""

    def forward(self, input_ids):
        return super().forward(input_ids) + 1.0


class OfPositions(nn.Embedding):
    """What it wants is no tokens."""

    embed_scale = 2.0

    def forward(self, tokens, positions):
        return super().forward(positions) * self.embed_scale


@pytest.mark.parametrize(
    "other",
    [
        AlsoShifted(7, 4, None, embed_scale=2.0),
        OfPositions(7, 4),
        T5Gemma2TextScaledWordEmbedding(7, 4, 0, embed_scale=2.0, eoi_token_index=3),
        BartScaledWordEmbedding(7, 4, None, embed_scale=None),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_does_more_than_scale_is_not_guessed(other):
    entries = {e.name: e for e in THOR(nn.Sequential(other, nn.Linear(4, 3))).coverage()}
    assert entries["0.weight"].reason == f"{type(other).__name__} overrides the forward of Embedding"


@pytest.mark.slow
def test_every_one_of_transformers():
    """Every class of the name, in every model of the library."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w*ScaledWordEmbedding)\(nn\.Embedding\)", path.read_text(), re.MULTILINE):
            found.append(name)
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            entries = THOR(nn.Sequential(getattr(module, name)(7, 4, 0, embed_scale=3.0), nn.Linear(4, 3))).coverage()
            assert entries[0].preconditioned == (name != "T5Gemma2TextScaledWordEmbedding"), name
    assert len(found) > 10


def gemma():
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "head_dim": 4}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))


def bart():
    sizes = {"vocab_size": 17, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "scale_embedding": True}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads, **tokens, forced_eos_token_id=2))


@pytest.mark.parametrize("make", [gemma, bart])
@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_models(make, scaling):
    """The whole model's largest matrix is covered, and it trains."""
    model = make()
    optimizer = THOR(model, lr=0.01, scaling=scaling)
    shared = next(e for e in optimizer.coverage() if e.shape[0] == 17)
    assert shared.preconditioned == (scaling is None)
    assert shared.kind == "Embedding" if scaling is None else shared.reason == "the input factor is diagonal"
    tokens, losses = torch.randint(3, 17, (4, 6)), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
