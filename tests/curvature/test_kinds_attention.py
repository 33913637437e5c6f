"""Factors of attention's four projections, against an attention written out by hand."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from comparing import DAMPING, assert_matches_reference, having
from reference import attention_by_hand
from torch_thor import THOR

N, L, S = 3, 4, 5


class Model(nn.Module):
    """An attention, whose mask options stand in the model."""

    def __init__(self, *, need_weights=False, call=None, **options):
        super().__init__()
        options = {"embed_dim": 6, "num_heads": 2, **options}
        self.attention = nn.MultiheadAttention(**options, dtype=torch.float64)
        self.call = {"need_weights": need_weights, **(call or {})}

    def forward(self, query, key, value):
        return self.attention(query=query, value=value, key=key, **self.call)[0]

    def by_hand(self, query, key, value):
        masks = {name: mask for name, mask in self.call.items() if name.endswith("_mask")}
        return attention_by_hand(self.attention, "attention", query, key, value, **masks)


def inputs(model, *, batch=N, key_length=S, query_length=L):
    """(query, key, value) as the attention takes them; no batch where `batch` is None."""
    attention, made = model.attention, []
    widths = attention.embed_dim, attention.kdim, attention.vdim
    for length, width in zip((query_length, key_length, key_length), widths, strict=True):
        leading = (length,) if batch is None else (length, batch)
        leading = leading[::-1] if attention.batch_first else leading
        made.append(torch.randn(*leading, width, dtype=torch.float64))
    return tuple(made)


def loss_of(terms):
    return lambda output: (output**3).sum() / terms


def by_hand(model, x):
    output, _, seen = model.by_hand(*x)
    return output, seen


def check(model, x, terms=N, **options):
    assert_matches_reference(model, x, loss_of(terms), terms=terms, forward=by_hand, **options)


MASKS = {
    "none": lambda heads, length, keys: None,
    "causal": lambda heads, length, keys: torch.ones(length, keys, dtype=torch.bool).triu(1),
    "float": lambda heads, length, keys: torch.randn(length, keys, dtype=torch.float64),
    "a head": lambda heads, length, keys: torch.randn(heads, length, keys, dtype=torch.float64),
}
PADDING = torch.tensor([[0, 0, 0, 1, 1], [0] * 5, [0, 1, 1, 1, 1]], dtype=torch.bool)
FLAGS = ("need_weights", "bias", "batch_first", "add_bias_kv", "add_zero_attn")


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@settings(max_examples=80)
@given(
    heads=st.integers(1, 3),
    size=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.none() | st.integers(1, 3),
    widths=st.tuples(*[st.none() | st.integers(1, 5)] * 2),
    split_dim=st.none() | st.integers(1, 7),
    flags=st.fixed_dictionaries({name: st.booleans() for name in FLAGS}),
    mask=st.sampled_from([*MASKS]),
    padding=st.booleans(),
    average=st.booleans(),
)
def test_any_attention(
    heads, size, lengths, batch, widths, split_dim, flags, mask, padding, average
):
    """Loss terms are sequences, or queries without a batch."""
    assume(batch or lengths[0] > 1)  # a single query is no batch
    masks = {"attn_mask": MASKS[mask](heads * (batch or 1), *lengths)}
    if padding:
        masks["key_padding_mask"] = PADDING[slice(batch) if batch else 0, ..., : lengths[1]]
    # torch takes the hint for wider scores too, where it is wrong
    is_causal = mask == "causal" and not (flags["add_bias_kv"] or flags["add_zero_attn"])
    call = {**masks, "average_attn_weights": average, "is_causal": is_causal}
    sizes = {"embed_dim": heads * size, "num_heads": heads, "kdim": widths[0], "vdim": widths[1]}
    model = Model(**sizes, **flags, call=call)
    x = inputs(model, batch=batch, query_length=lengths[0], key_length=lengths[1])
    check(model, x, terms=batch or lengths[0], split_dim=split_dim)
    # the oracle is an attention
    wanted, found = model.attention(*x, **masks), model.by_hand(*x)[:2]
    torch.testing.assert_close(found, wanted)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = (torch.autograd.grad(loss_of(1)(y), parameters) for y, _ in (found, wanted))
    torch.testing.assert_close(*gradients)


def test_a_mask_of_rows_holds_for_the_projections_whose_length_it_has():
    """Cross attention: the mask of the keys (N, S) leaves rows out of k and v only."""
    for batch_first in (True, False):
        model = Model(batch_first=batch_first, call={"key_padding_mask": PADDING})
        x = inputs(model)
        optimizer = having(THOR(model, lr=0.0, damping=DAMPING), row_mask=~PADDING)
        loss_of(N)(model(*x)).backward()
        optimizer.step()
        if batch_first:  # as the reference wants it
            check(model, x, split_dim=128, optimizer=optimizer, mask=(~PADDING).numpy())
        assert optimizer.curvature["attention.k_proj"].rows_per_term == 9 / N
        assert optimizer.curvature["attention.q_proj"].rows_per_term == L
