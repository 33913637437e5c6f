"""Fused weights of known classes: the rows that are taken for query, key and value are those that
the module uses as such. And hints about layers that only have the name and the size of one.
"""

import copy
import re

import pytest
import torch
import transformers
from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from torch import nn
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.decision_transformer.modeling_decision_transformer import (
    DecisionTransformerGPT2Attention,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.imagegpt.modeling_imagegpt import ImageGPTAttention
from transformers.models.mpt.modeling_mpt import MptAttention
from transformers.models.openai.modeling_openai import Attention as OpenAIAttention

from torch_thor import THOR, ThorMuon, split_rows

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")

WIDTH, HEADS, LENGTH = 12, 3, 5
GPT2 = {"hidden_size": WIDTH, "n_head": HEADS, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
EAGER = {"attn_implementation": "eager"}


class Called(nn.Module):
    """An attention that is called as its model calls it; returns its output."""

    def __init__(self, attention, **arguments):
        super().__init__()
        self.attention, self.arguments = attention.double().eval(), arguments

    def forward(self, x):
        output = self.attention(x, **self.arguments)
        return output[0] if isinstance(output, tuple | list) else output


def gpt2(kind, config, **options):
    return lambda: Called(kind(config(**GPT2, **EAGER), layer_idx=0, **options))


def neox():
    config = transformers.GPTNeoXConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_dropout=0.0, **EAGER
    )
    angles = torch.ones(1, LENGTH, 2, dtype=torch.float64), torch.zeros(1, LENGTH, 2)
    return Called(
        GPTNeoXAttention(config, layer_idx=0), attention_mask=None, position_embeddings=angles
    )


def bloom():
    config = transformers.BloomConfig(
        hidden_size=WIDTH, n_head=HEADS, attention_dropout=0.0, hidden_dropout=0.0
    )
    zeros = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64)
    rest = {"residual": torch.zeros(()), "attention_mask": zeros}
    return Called(
        BloomAttention(config, layer_idx=0),
        alibi=torch.zeros(2 * HEADS, 1, LENGTH).double(),
        **rest,
    )


CROSS = {"encoder_hidden_states": torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)}


def cross():
    attention = gpt2(GPT2Attention, transformers.GPT2Config, is_cross_attention=True)().attention
    return Called(attention, **CROSS)


def openai():
    config = transformers.OpenAIGPTConfig(n_positions=LENGTH, **GPT2)
    return Called(OpenAIAttention(WIDTH, LENGTH, config, scale=True))


def mpt():
    config = transformers.MptConfig(d_model=WIDTH, n_heads=HEADS, attn_config={"attn_pdrop": 0})
    bias = torch.zeros(HEADS, 1, LENGTH, dtype=torch.float64)
    return Called(MptAttention(config, layer_idx=0), position_bias=bias)


# the class, its fused layer, its last layer, how many projections there are
KNOWN = {
    "timm": (lambda: Called(Attention(WIDTH, HEADS, qkv_bias=True)), "qkv", "proj", 3),
    "timm, rope": (lambda: Called(AttentionRope(WIDTH, HEADS)), "qkv", "proj", 3),
    "timm, other width": (
        lambda: Called(Attention(WIDTH, HEADS, attn_head_dim=6)),
        "qkv",
        "proj",
        3,
    ),
    "BEiT": (lambda: Called(BeitAttention(WIDTH, HEADS)), "qkv", "proj", 3),
    "EVA": (
        lambda: Called(EvaAttention(WIDTH, HEADS, qkv_bias=False, scale_norm=False)),
        "qkv",
        "proj",
        3,
    ),
    "Swin": (
        lambda: Called(WindowAttention(WIDTH, HEADS, window_size=(1, LENGTH))),
        "qkv",
        "proj",
        3,
    ),
    "MPT": (mpt, "Wqkv", "out_proj", 3),
    "GPT-2": (gpt2(GPT2Attention, transformers.GPT2Config), "c_attn", "c_proj", 3),
    "GPT-2, cross": (cross, "c_attn", "c_proj", 2),
    "ImageGPT": (gpt2(ImageGPTAttention, transformers.ImageGPTConfig), "c_attn", "c_proj", 3),
    "DecisionTransformer": (
        gpt2(DecisionTransformerGPT2Attention, transformers.DecisionTransformerConfig),
        "c_attn",
        "c_proj",
        3,
    ),
    "OpenAI GPT": (openai, "c_attn", "c_proj", 3),
    "GPT-NeoX": (neox, "query_key_value", "dense", 3),
    "Bloom": (bloom, "query_key_value", "dense", 3),
}


def split_of(model, layer):
    """The projections of a layer's weight that ThorMuon takes."""
    (split,) = ThorMuon(model)._curvature.plan.row_splits.values()
    assert sum(split.sizes) in getattr(model.attention, layer).weight.shape
    return split


@torch.no_grad()
def scaled(model, layer, split, factors):
    """A copy whose projections are multiplied by factors."""
    twin = copy.deepcopy(model)
    of = getattr(twin.attention, layer)
    weight = of.weight if of.weight.shape[0] == sum(split.sizes) else of.weight.T
    for rows, factor in zip(split.rows(), factors, strict=True):
        weight[rows] *= factor
        of.bias.data[rows] *= factor
    return twin


@pytest.mark.parametrize("name", KNOWN)
def test_the_rows_of_known_classes_are_those_that_they_use(name):
    """Attention depends on the product of query and key, and is linear in the value."""
    make, layer, last, projections = KNOWN[name]
    torch.manual_seed(0)
    model = make()
    fused = getattr(model.attention, layer)
    with torch.no_grad():  # GPT-2 and Bloom begin with small weights and without biases
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    if fused.bias is None:
        fused.bias = nn.Parameter(torch.randn(len(fused.weight), dtype=torch.float64))
    if getattr(model.attention, last).bias is not None:
        getattr(model.attention, last).bias.data.zero_()
    split = split_of(model, layer)
    assert len(split.sizes) == projections
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    wanted = model(x)
    *query_and_key, _ = split.sizes
    if projections == 3:
        equal = scaled(model, layer, split, (2.0, 0.5, 1.0))(x)
        torch.testing.assert_close(equal, wanted, rtol=1e-9, atol=1e-9)
    differs = scaled(model, layer, split, (2.0,) * len(query_and_key) + (1.0,))(x)
    assert (differs - wanted).abs().max() > 1e-3
    doubled = scaled(model, layer, split, (1.0,) * len(query_and_key) + (2.0,))(x)
    torch.testing.assert_close(doubled, 2 * wanted, rtol=1e-9, atol=1e-9)


class InOrder(nn.Module):
    """A fused layer whose weight has the rows of each projection together."""

    def __init__(self, layer, split):
        super().__init__()
        self.order = torch.cat(split.rows())
        self.layer = copy.deepcopy(layer)
        self.layer.weight.data = layer.weight.data[self.order]
        self.layer.bias.data = layer.bias.data[self.order]
        split_rows(self.layer, split.sizes)

    def forward(self, x):
        return self.layer(x)[..., self.order.argsort()]


@pytest.mark.parametrize("ratio", [None, 0.01])
def test_heads_that_take_turns_step_as_rows_in_order(ratio):
    torch.manual_seed(0)
    model = neox()
    split = split_of(model, "query_key_value")
    assert split.turns == HEADS
    twin = copy.deepcopy(model)
    twin.attention.query_key_value = InOrder(model.attention.query_key_value, split)
    before = model.attention.query_key_value.weight.detach().clone()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    for one in (model, twin):
        optimizer = ThorMuon(one, split_dim=4, max_update_ratio=ratio, update_interval=2)
        for _ in range(4):
            one(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    weight, wanted = model.attention.query_key_value.weight, twin.attention.query_key_value.layer
    moved = (weight - before).norm(dim=1)
    assert moved.min() > 1e-4
    torch.testing.assert_close(weight[torch.cat(split.rows())], wanted.weight)


def test_a_class_is_known_by_what_it_is_and_not_by_its_name():
    class Mixed(Attention):
        """Heads may take turns here."""

        def forward(self, x):
            return super().forward(x)

    class Same(Attention):
        """The same rows."""

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    Mine.__name__ = Mine.__qualname__ = "Attention"
    for attention, count in ((Mixed(WIDTH, HEADS), 1), (Same(WIDTH, HEADS), 3), (Mine(), 1)):
        (qkv,) = [e for e in ThorMuon(attention).coverage() if e.name == "qkv.weight"]
        assert len(qkv.matrices) == count


def test_a_declaration_counts_more_than_a_class():
    for sizes, shapes in ((1, ((36, 12),)), ((12, 24), ((12, 12), (24, 12)))):
        model = Attention(WIDTH, HEADS)
        split_rows(model.qkv, sizes)
        assert ThorMuon(model).coverage()[0].matrices == shapes


def test_a_model_of_gpt2_and_one_of_gpt_neox():
    for make, name in (
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(**GPT2, n_layer=1, vocab_size=7, n_positions=8)
            ),
            "transformer.h.0.attn.c_attn.weight",
        ),
        (
            lambda: transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(
                    hidden_size=WIDTH,
                    num_attention_heads=HEADS,
                    num_hidden_layers=1,
                    vocab_size=7,
                    intermediate_size=16,
                )
            ),
            "gpt_neox.layers.0.attention.query_key_value.weight",
        ),
    ):
        optimizer = ThorMuon(make())
        (fused,) = [e for e in optimizer.coverage() if e.name == name]
        assert fused.matrices == ((12, 12),) * 3
        assert "orthogonalised: 3 of 12 x 12" in repr(optimizer)
        assert "split_rows" not in repr(optimizer)


# ---- hints ---------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self, name, inputs, outputs):
        super().__init__()
        self.add_module(name, nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    ("name", "outputs", "sizes"),
    [
        ("qkv", 36, "3"),
        ("Wqkv", 36, "3"),
        ("c_attn", 36, "3"),
        ("in_proj", 36, "3"),
        ("qkv_proj", 20, r"\(12, 4, 4\)"),
        ("qkv", 18, r"\(12, 3, 3\)"),
        ("qkv", 14, r"\(12, 1, 1\)"),
        ("qkv", 48, None),
        ("in_proj", 24, r"\(12, 6, 6\)"),
        ("qkv", 12, None),
        ("qkv", 17, None),
        ("qkv", 22, None),
        ("fc", 36, None),
    ],
)
def test_a_layer_with_the_name_and_the_size_gets_a_hint(name, outputs, sizes):
    model = nn.Sequential(Named(name, 12, outputs), nn.Linear(12, 3))
    text = repr(ThorMuon(model))
    if sizes is None:
        assert "split_rows" not in text
        return
    (line,) = [line for line in text.splitlines() if "split_rows" in line]
    assert re.match(
        rf"'0\.{name}': by name and size query, key and value.*split_rows\(layer, {sizes}\)", line
    )


def test_no_hint_where_there_is_nothing_to_say():
    def two():
        return nn.Sequential(Named("qkv", 12, 36), Named("qkv", 12, 36))

    assert "'0.qkv', '1.qkv': by name" in repr(ThorMuon(two()))
    assert "split_rows" not in repr(THOR(two()))  # which orthogonalises nothing
    model = two()
    split_rows(model[0].qkv, 3)
    model[1].qkv.weight.requires_grad_(False)
    assert "split_rows" not in repr(ThorMuon(model))
    model = two()
    split_rows(model[0].qkv, 1)
    assert "split_rows" not in repr(ThorMuon(model, layers="-1.qkv"))
