"""Fused weights of known classes: the right rows are taken for query, key and value.

The option row_splits: test_row_splits.py.
"""

import copy

import pytest
import torch
import transformers
from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from torch import nn
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from torch_thor import ThorMuon

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")

WIDTH, HEADS, LENGTH = 12, 3, 5
EAGER = {"attn_implementation": "eager"}


class Called(nn.Module):
    """An attention that is called as its model calls it; returns its output."""

    def __init__(self, attention, **arguments):
        super().__init__()
        self.attention, self.arguments = attention.double().eval(), arguments

    def forward(self, x):
        output = self.attention(x, **self.arguments)
        return output[0] if isinstance(output, tuple | list) else output


def gpt2():
    config = transformers.GPT2Config(
        hidden_size=WIDTH, n_head=HEADS, attn_pdrop=0.0, resid_pdrop=0.0, **EAGER
    )
    return Called(GPT2Attention(config, layer_idx=0))


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
    return Called(
        BloomAttention(config, layer_idx=0), residual=torch.zeros(()),
        alibi=torch.zeros(2 * HEADS, 1, LENGTH).double(),
        attention_mask=torch.zeros(1, 1, LENGTH, LENGTH).double(),
    )  # fmt: skip


def mpt():
    config = transformers.MptConfig(d_model=WIDTH, n_heads=HEADS, attn_config={"attn_pdrop": 0})
    bias = torch.zeros(HEADS, 1, LENGTH, dtype=torch.float64)
    return Called(MptAttention(config, layer_idx=0), position_bias=bias)


def timm(kind, **options):
    return lambda: Called(kind(WIDTH, HEADS, **options))


# the class, its fused layer, its last layer
KNOWN = {
    "timm": (timm(Attention, qkv_bias=True), "qkv", "proj"),
    "timm, rope": (timm(AttentionRope), "qkv", "proj"),
    "BEiT": (timm(BeitAttention), "qkv", "proj"),
    "EVA": (timm(EvaAttention, qkv_bias=False, scale_norm=False), "qkv", "proj"),
    "Swin": (timm(WindowAttention, window_size=(1, LENGTH)), "qkv", "proj"),
    "MPT": (mpt, "Wqkv", "out_proj"),
    "GPT-2": (gpt2, "c_attn", "c_proj"),
    "GPT-NeoX": (neox, "query_key_value", "dense"),
    "Bloom": (bloom, "query_key_value", "dense"),
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
    fused = getattr(twin.attention, layer)
    weight = fused.weight if fused.weight.shape[0] == sum(split.sizes) else fused.weight.T
    for rows, factor in zip(split.rows(), factors, strict=True):
        weight[rows] *= factor
        fused.bias.data[rows] *= factor
    return twin


@pytest.mark.parametrize("name", KNOWN)
def test_known_classes_use_the_rows_that_are_taken(name):
    """Attention depends on the product of query and key, and is linear in the value."""
    make, layer, last = KNOWN[name]
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
    assert len(split.sizes) == 3
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    wanted = model(x)
    equal = scaled(model, layer, split, (2.0, 0.5, 1.0))(x)
    torch.testing.assert_close(equal, wanted, rtol=1e-9, atol=1e-9)
    differs = scaled(model, layer, split, (2.0, 2.0, 1.0))(x)
    assert (differs - wanted).abs().max() > 1e-3
    doubled = scaled(model, layer, split, (1.0, 1.0, 2.0))(x)
    torch.testing.assert_close(doubled, 2 * wanted, rtol=1e-9, atol=1e-9)


class InOrder(nn.Module):
    """A fused layer whose weight has the rows of each projection together."""

    def __init__(self, layer, split):
        super().__init__()
        self.order = torch.cat(split.rows())
        self.layer = copy.deepcopy(layer)
        self.layer.weight.data = layer.weight.data[self.order]
        self.layer.bias.data = layer.bias.data[self.order]

    def forward(self, x):
        return self.layer(x)[..., self.order.argsort()]


def test_heads_that_take_turns_step_as_rows_in_order():
    model = neox()
    split = split_of(model, "query_key_value")
    assert split.turns == HEADS
    twin = copy.deepcopy(model)
    twin.attention.query_key_value = InOrder(model.attention.query_key_value, split)
    before = model.attention.query_key_value.weight.detach().clone()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    for each, splits in ((model, None), (twin, {"*.layer": split.sizes})):
        optimizer = ThorMuon(each, split_dim=4, update_interval=2, row_splits=splits)
        for _ in range(4):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    weight, wanted = model.attention.query_key_value.weight, twin.attention.query_key_value.layer
    assert (weight - before).norm(dim=1).min() > 1e-4
    torch.testing.assert_close(weight[torch.cat(split.rows())], wanted.weight)


class Other(Attention):
    """A subclass whose forward is not known: its heads may take turns."""

    def forward(self, x):
        return super().forward(x)


def test_a_class_is_known_by_the_forward_that_runs_and_the_option_counts_more():
    for attention, splits, shapes in (
        (Other, None, ((36, 12),)),
        (Attention, {"qkv": 1}, ((36, 12),)),
        (Attention, {"qkv": (12, 24)}, ((12, 12), (24, 12))),
    ):
        optimizer = ThorMuon(attention(WIDTH, HEADS), row_splits=splits)
        assert optimizer.coverage()[0].matrices == shapes
