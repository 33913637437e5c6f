"""Factors of attention's four projections, against an attention written out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comparing import DAMPING, assert_matches_reference, having
from reference import attention_by_hand, attention_layers
from torch_thor import THOR

E, HEADS, N, L, S = 6, 2, 3, 4, 5


class Model(nn.Module):
    """An attention, whose mask options stand in the model."""

    def __init__(self, *, need_weights=False, call=None, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(**{"embed_dim": E, "num_heads": HEADS, **options}, dtype=torch.float64)
        self.call = {"need_weights": need_weights, **(call or {})}

    def forward(self, query, key, value):
        return self.attention(query=query, value=value, key=key, **self.call)[0]

    def by_hand(self, query, key, value):
        masks = {name: mask for name, mask in self.call.items() if name in ("attn_mask", "key_padding_mask")}
        return attention_by_hand(self.attention, "attention", query, key, value, **masks)


def inputs(model, *, batch=N, key_length=S, query_length=L):
    """(query, key, value), different, as the attention takes them; no batch where `batch` is None."""
    attention, made = model.attention, []
    widths = attention.embed_dim, attention.kdim, attention.vdim
    for length, width in zip((query_length, key_length, key_length), widths, strict=True):
        leading = (length,) if batch is None else (batch, length) if attention.batch_first else (length, batch)
        made.append(torch.randn(*leading, width, dtype=torch.float64))
    return tuple(made)


def loss_of(terms):
    return lambda output: (output**3).sum() / terms


def check(model, x, terms=N, split_dim=None, forward=lambda model, x: model.by_hand(*x)[::2], **options):
    options = {"terms": terms, "split_dim": split_dim, "forward": forward, **options}
    return assert_matches_reference(model, x, loss_of(terms), **options)


CAUSAL = torch.ones(L, S, dtype=torch.bool).triu(1)
PADDING = torch.zeros(N, S, dtype=torch.bool)
PADDING[0, 3:] = PADDING[2, 1:] = True
FIRST = {"batch_first": True}
# `test_any_attention` has all combinations of the others
CASES = {
    "sequence_first": {},
    "separate_sequence_first_no_bias": {"kdim": 7, "vdim": 2, "bias": False},
    "bias_kv_and_zero_attn": {**FIRST, "add_bias_kv": True, "add_zero_attn": True},
    "weights_bias_kv": {**FIRST, "need_weights": True, "add_bias_kv": True, "kdim": 3},
    "boolean_mask": {**FIRST, "call": {"attn_mask": CAUSAL}},
    "float_mask": {"call": {"attn_mask": torch.randn(L, S, dtype=torch.float64)}},
    "mask_a_head": {**FIRST, "call": {"attn_mask": torch.randn(N * HEADS, L, S, dtype=torch.float64)}},
    "padding": {**FIRST, "call": {"key_padding_mask": PADDING}},
    "padding_weights": {"need_weights": True, "call": {"key_padding_mask": PADDING}},
    "padding_and_mask": {**FIRST, "call": {"key_padding_mask": PADDING, "attn_mask": CAUSAL}},
    "padding_bias_kv": {**FIRST, "add_bias_kv": True, "add_zero_attn": True, "call": {"key_padding_mask": PADDING}},
    "separate_heads_weights": {**FIRST, "call": {"average_attn_weights": False, "need_weights": True}},
}


@pytest.mark.parametrize("name", CASES)
def test_factors(name):
    """N is the leading dimension of the batch, also where the sequence comes first; the oracle is an attention."""
    model = Model(**CASES[name])
    x = inputs(model)
    for split_dim in (None, 4):
        check(model, x, split_dim=split_dim)
        model.zero_grad()
    wanted = model.attention(*x, **{**model.call, "need_weights": True, "average_attn_weights": True})
    found = model.by_hand(*x)[:2]
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(loss_of(1)(output), list(model.parameters())) for output, _ in (found, wanted)]
    torch.testing.assert_close(*grads)


@given(
    heads=st.integers(1, 3),
    size=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.integers(1, 3),
    widths=st.tuples(*[st.one_of(st.none(), st.integers(1, 5))] * 2),
    split_dim=st.one_of(st.none(), st.integers(1, 7)),
    flags=st.fixed_dictionaries(
        {k: st.booleans() for k in ("need_weights", "bias", "batch_first", "add_bias_kv", "add_zero_attn")}
    ),
)
def test_any_attention(heads, size, lengths, batch, widths, split_dim, flags):
    model = Model(embed_dim=heads * size, num_heads=heads, kdim=widths[0], vdim=widths[1], **flags)
    x = inputs(model, batch=batch, query_length=lengths[0], key_length=lengths[1])
    check(model, x, terms=batch, split_dim=split_dim)


def test_a_sequence_alone_and_self_attention():
    """Without a batch the leading dimension is the sequence's; one tensor three times, for which fast kernels look."""
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for batch_first in (True, False):
        for need_weights in (True, False):
            options = {"batch_first": batch_first, "need_weights": need_weights}
            for kdim in (None, 3):
                model = Model(kdim=kdim, **options)
                check(model, inputs(model, batch=None), terms=L)
            model = Model(**options)
            check(model, inputs(model, key_length=L)[:1] * 3)
        model = Model(batch_first=batch_first, call={"attn_mask": causal, "is_causal": True})
        check(model, inputs(model, key_length=L))


def test_called_twice():
    class Twice(Model):
        def forward(self, x, key, value):
            return self.attention(super().forward(x, key, value), key, value)[0]

    def twice_by_hand(model, x):
        output, _, seen = model.by_hand(*x)
        output, _, more = model.by_hand(output, *x[1:])
        return output, seen + more

    model = Twice(batch_first=True)
    optimizer = check(model, inputs(model), forward=twice_by_hand)
    assert optimizer.curvature["attention.q_proj"].rows_per_term == 2 * L
    assert optimizer.curvature["attention.k_proj"].rows_per_term == 2 * S


def test_attention_is_the_model_itself():
    model = nn.MultiheadAttention(E, HEADS, batch_first=True).double()
    optimizer = THOR(model)
    assert set(optimizer.curvature) == {"q_proj", "k_proj", "v_proj", "out_proj"} == set(attention_layers(model, ""))
    x = torch.randn(N, L, E, dtype=torch.float64)
    model(x, x, x)[0].square().mean().backward()
    optimizer.step()
    assert all(curvature.refreshes == 1 for curvature in optimizer.curvature.values())


def test_a_mask_of_rows_holds_for_the_projections_whose_length_it_has():
    """Cross attention: the mask of the keys (N, S) leaves rows out of k and v alone; it is always batch first."""
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
