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
        return self.attention(query, key, value, **self.call)[0]


def by_hand(model, x):
    masks = {key: value for key, value in model.call.items() if key in ("attn_mask", "key_padding_mask")}
    output, _, seen = attention_by_hand(model.attention, "attention", *x, **masks)
    return output, seen


def inputs(model, *, batch=N, key_length=S):
    """(query, key, value), different, as the attention takes them; no batch where `batch` is None."""
    attention = model.attention
    made = []
    for length, width in ((L, E), (key_length, attention.kdim), (key_length, attention.vdim)):
        if batch is None:
            shape = (length, width)
        else:
            shape = (batch, length, width) if attention.batch_first else (length, batch, width)
        made.append(torch.randn(*shape, dtype=torch.float64))
    return tuple(made)


def loss_of(terms):
    return lambda output: (output**3).sum() / terms


def causal(size=L, other=S):
    return torch.ones(size, other, dtype=torch.bool).triu(1)


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
    "boolean_mask": {**FIRST, "call": {"attn_mask": causal()}},
    "float_mask": {"call": {"attn_mask": torch.randn(L, S, dtype=torch.float64)}},
    "mask_a_head": {**FIRST, "call": {"attn_mask": torch.randn(N * HEADS, L, S, dtype=torch.float64)}},
    "padding": {**FIRST, "call": {"key_padding_mask": PADDING}},
    "padding_weights": {"need_weights": True, "call": {"key_padding_mask": PADDING}},
    "padding_and_mask": {**FIRST, "call": {"key_padding_mask": PADDING, "attn_mask": causal()}},
    "padding_bias_kv_zero_attn": {
        **FIRST,
        "add_bias_kv": True,
        "add_zero_attn": True,
        "call": {"key_padding_mask": PADDING},
    },
    "separate_heads_weights": {**FIRST, "call": {"average_attn_weights": False, "need_weights": True}},
}


@pytest.mark.parametrize("split_dim", [None, 4])
@pytest.mark.parametrize("name", CASES)
def test_factors(name, split_dim):
    """N is the leading dimension of the batch, also where the sequence comes first."""
    model = Model(**CASES[name]).double()
    assert_matches_reference(model, inputs(model), loss_of(N), terms=N, split_dim=split_dim, forward=by_hand)


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_is_an_attention(name):
    """Output, weights and every gradient by hand are torch's."""
    model = Model(**CASES[name]).double()
    x = inputs(model)
    masks = {key: value for key, value in model.call.items() if key in ("attn_mask", "key_padding_mask")}
    output, weights = model.attention(*x, need_weights=True, **masks)
    own_output, own_weights, _ = attention_by_hand(model.attention, "attention", *x, **masks)
    torch.testing.assert_close(own_output, output)
    torch.testing.assert_close(own_weights, weights)
    wanted = torch.autograd.grad(loss_of(1)(output), list(model.parameters()))
    got = torch.autograd.grad(loss_of(1)(own_output), list(model.parameters()))
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_one_sequence_alone(same, need_weights, batch_first):
    """Without a batch the leading dimension is the sequence's, as it is for a linear layer."""
    model = Model(batch_first=batch_first, need_weights=need_weights, kdim=None if same else 3).double()
    assert_matches_reference(model, inputs(model, batch=None), loss_of(L), terms=L, split_dim=None, forward=by_hand)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention(batch_first, need_weights):
    """One tensor three times; the fast kernels look for that."""
    model = Model(batch_first=batch_first, need_weights=need_weights).double()
    x = (inputs(model, key_length=L)[0],) * 3
    assert_matches_reference(model, x, loss_of(N), terms=N, split_dim=None, forward=by_hand)


def test_called_twice():
    class Twice(Model):
        def forward(self, x, key, value):
            return self.attention(super().forward(x, key, value), key, value)[0]

    def twice_by_hand(model, x):
        output, seen = by_hand(model, x)
        output, more = by_hand(model, (output, *x[1:]))
        return output, seen + more

    model = Twice(batch_first=True).double()
    optimizer = assert_matches_reference(
        model, inputs(model), loss_of(N), terms=N, split_dim=None, forward=twice_by_hand
    )
    assert optimizer.curvature["attention.q_proj"].rows_per_term == 2 * L
    assert optimizer.curvature["attention.k_proj"].rows_per_term == 2 * S


def test_keyword_arguments():
    class ByName(Model):
        def forward(self, query, key, value):
            return self.attention(value=value, key=key, query=query, need_weights=False)[0]

    model = ByName(batch_first=True).double()
    assert_matches_reference(model, inputs(model), loss_of(N), terms=N, split_dim=None, forward=by_hand)


def test_causal_hint():
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    model = Model(batch_first=True, call={"attn_mask": mask, "is_causal": True}).double()
    x = inputs(model, key_length=L)
    assert_matches_reference(model, x, loss_of(N), terms=N, split_dim=None, forward=by_hand)


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


def test_a_mask_of_rows_holds_for_the_projections_whose_length_it_has():
    """Cross attention: the mask of the keys (N, S) leaves rows out of k and v alone."""
    model = Model(batch_first=True, call={"key_padding_mask": PADDING}).double()
    x = inputs(model)
    optimizer = THOR(model, lr=0.0, damping=0.07)
    optimizer.row_mask = ~PADDING
    loss_of(N)(model(*x)).backward()
    optimizer.step()
    assert_matches_reference(
        model, x, loss_of(N), terms=N, split_dim=128, forward=by_hand, optimizer=optimizer, mask=(~PADDING).numpy()
    )
    assert optimizer.curvature["attention.k_proj"].rows_per_term == 9 / N
    assert optimizer.curvature["attention.q_proj"].rows_per_term == L


def test_a_mask_of_rows_is_batch_first_also_where_the_sequence_comes_first():
    model = Model(call={"key_padding_mask": PADDING}).double()
    x = inputs(model)
    optimizer = THOR(model, lr=0.0, damping=0.07)
    optimizer.row_mask = ~PADDING
    loss_of(N)(model(*x)).backward()
    optimizer.step()
    assert optimizer.curvature["attention.k_proj"].rows_per_term == 9 / N


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
    model.double()
    made = []
    for length, width in zip((lengths[0], lengths[1], lengths[1]), (heads * size, *widths), strict=True):
        shape = (batch, length) if flags["batch_first"] else (length, batch)
        made.append(torch.randn(*shape, width or heads * size, dtype=torch.float64))
    assert_matches_reference(model, tuple(made), loss_of(batch), terms=batch, split_dim=split_dim, forward=by_hand)
