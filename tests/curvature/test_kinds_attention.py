"""Factors of attention's four projections, against an attention written out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comparing import assert_matches_reference
from reference import attention_by_hand, attention_layers
from torch_thor import THOR

E, HEADS, N, L, S = 6, 2, 3, 4, 5


class Model(nn.Module):
    """An attention, whose mask options stand in the model."""

    def __init__(self, *, need_weights=False, call=None, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, **options)
        self.call = {"need_weights": need_weights, **(call or {})}

    def forward(self, query, key, value):
        return self.attention(query=query, value=value, key=key, **self.call)[0]


def masks(model):
    return {key: value for key, value in model.call.items() if key in ("attn_mask", "key_padding_mask")}


def by_hand(model, x):
    output, _, seen = attention_by_hand(model.attention, "attention", *x, **masks(model))
    return output, seen


def inputs(model, *, batch=N, key_length=S, query_length=L):
    """(query, key, value), different, as the attention takes them; no batch where `batch` is None."""
    attention, made = model.attention, []
    for length, width in (
        (query_length, attention.embed_dim),
        (key_length, attention.kdim),
        (key_length, attention.vdim),
    ):
        leading = (length,) if batch is None else (batch, length) if attention.batch_first else (length, batch)
        made.append(torch.randn(*leading, width, dtype=torch.float64))
    return tuple(made)


def loss_of(terms):
    return lambda output: (output**3).sum() / terms


def check(model, x, terms=N, split_dim=None, **options):
    return assert_matches_reference(
        model, x, loss_of(terms), terms=terms, split_dim=split_dim, **{"forward": by_hand, **options}
    )


CAUSAL = torch.ones(L, S, dtype=torch.bool).triu(1)
PADDING = torch.zeros(N, S, dtype=torch.bool)
PADDING[0, 3:] = PADDING[2, 1:] = True
FIRST = {"batch_first": True}

CASES = {
    "fused": FIRST,
    "sequence_first": {},
    "no_bias": {**FIRST, "bias": False},
    "separate": {**FIRST, "kdim": 3, "vdim": 5},
    "separate_sequence_first_no_bias": {"kdim": 7, "vdim": 2, "bias": False},
    "only_kdim": {**FIRST, "kdim": 4},
    "bias_kv": {**FIRST, "add_bias_kv": True},
    "zero_attn": {**FIRST, "add_zero_attn": True},
    "bias_kv_and_zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "weights": {**FIRST, "need_weights": True},
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
    """N is the leading dimension of the batch, also where the sequence comes first."""
    for split_dim in (None, 4):
        model = Model(**CASES[name]).double()
        check(model, inputs(model), split_dim=split_dim)


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_is_an_attention(name):
    """Output, weights and every gradient by hand are torch's."""
    model = Model(**CASES[name]).double()
    x = inputs(model)
    found = attention_by_hand(model.attention, "attention", *x, **masks(model))[:2]
    wanted = model.attention(*x, need_weights=True, **masks(model))
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(loss_of(1)(output), list(model.parameters())) for output, _ in (found, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_sequence_alone_and_self_attention(need_weights, batch_first):
    """Without a batch the leading dimension is the sequence's; one tensor three times, for which fast kernels look."""
    for kdim in (None, 3):
        model = Model(batch_first=batch_first, need_weights=need_weights, kdim=kdim).double()
        check(model, inputs(model, batch=None), terms=L)
    model = Model(batch_first=batch_first, need_weights=need_weights).double()
    check(model, inputs(model, key_length=L)[:1] * 3)
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    model = Model(batch_first=batch_first, call={"attn_mask": causal, "is_causal": True}).double()
    check(model, inputs(model, key_length=L))


def test_called_twice():
    class Twice(Model):
        def forward(self, x, key, value):
            return self.attention(super().forward(x, key, value), key, value)[0]

    def twice_by_hand(model, x):
        output, seen = by_hand(model, x)
        output, more = by_hand(model, (output, *x[1:]))
        return output, seen + more

    model = Twice(batch_first=True).double()
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


def test_fused_weight_keeps_three_sets_of_factors():
    """Each of the three layers of a fused weight has its own A and counters, and its rows of G."""
    model = Model(batch_first=True)
    optimizer = THOR(model)
    model(*(x.float() for x in inputs(model))).square().mean().backward()
    optimizer.step()
    keys = set(optimizer.state[model.attention.in_proj_weight])
    for part in "qkv":
        assert {f"{part}_{key}" for key in ("A", "A_inverse", "refreshes", "due")} <= keys
    assert {"G", "G_inverse"} <= keys
    assert not {"A", "q_G", "refreshes"} & keys
    assert {"A", "G", "refreshes"} <= set(optimizer.state[model.attention.out_proj.weight])


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mask_of_rows_holds_for_the_projections_whose_length_it_has(batch_first):
    """Cross attention: the mask of the keys (N, S) leaves rows out of k and v alone; it is always batch first."""
    model = Model(batch_first=batch_first, call={"key_padding_mask": PADDING}).double()
    x = inputs(model)
    optimizer = THOR(model, lr=0.0, damping=0.07)
    optimizer.row_mask = ~PADDING
    loss_of(N)(model(*x)).backward()
    optimizer.step()
    if batch_first:  # as the reference wants it
        check(model, x, split_dim=128, optimizer=optimizer, mask=(~PADDING).numpy())
    assert optimizer.curvature["attention.k_proj"].rows_per_term == 9 / N
    assert optimizer.curvature["attention.q_proj"].rows_per_term == L


@given(
    heads=st.integers(1, 3),
    size=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.integers(1, 3),
    widths=st.tuples(*[st.one_of(st.none(), st.integers(1, 5))] * 2),
    split_dim=st.one_of(st.none(), st.integers(1, 7)),
    need_weights=st.booleans(),
    flags=st.fixed_dictionaries({k: st.booleans() for k in ("bias", "batch_first", "add_bias_kv", "add_zero_attn")}),
)
def test_any_attention(heads, size, lengths, batch, widths, split_dim, need_weights, flags):
    model = Model(need_weights=need_weights)
    model.attention = nn.MultiheadAttention(heads * size, heads, kdim=widths[0], vdim=widths[1], **flags)
    x = inputs(model.double(), batch=batch, query_length=lengths[0], key_length=lengths[1])
    check(model, x, terms=batch, split_dim=split_dim)
