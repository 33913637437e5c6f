"""`nn.MultiheadAttention` computes what it computes without THOR, on refreshes and between them."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from tiny import listened_to
from torch_thor import THOR

E, HEADS, N, L = 8, 2, 3, 4


class Model(nn.Module):
    """An attention between linear layers; gives the attention's weights too."""

    def __init__(self, call=None, **options):
        super().__init__()
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 3)
        self.attention = nn.MultiheadAttention(E, HEADS, **options)
        self.call = call or {}

    def forward(self, x):
        x = self.first(x)
        y, shares = self.attention(x, x, x, **self.call)
        return self.last(y), shares


CASES = {
    "plain": {"batch_first": True},
    "no_bias": {"batch_first": True, "bias": False},
    "separate": {"kdim": E, "vdim": E, "add_bias_kv": True, "add_zero_attn": True},
    "a_head_each": {"batch_first": True, "call": {"average_attn_weights": False}},
    "mask": {"call": {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1)}},
    "dropout": {"batch_first": True, "dropout": 0.4},
    "dropout_no_weights": {"dropout": 0.4, "call": {"need_weights": False}},
}


def loss(output):
    """The mean cube, in float32 at least."""
    return (output.to(torch.promote_types(output.dtype, torch.float32)) ** 3).mean()


def step(output, optimizer):
    loss(output).backward()
    optimizer.step()
    optimizer.zero_grad()


def refreshes(optimizer):
    return {curvature.refreshes for curvature in optimizer.curvature.values()}


def passed(model, x):
    """Output, attention weights, and gradients by all parameters and by the input."""
    torch.manual_seed(5)  # dropout draws the same numbers
    leaf = x.clone().requires_grad_()
    output, shares = model(leaf)
    grads = torch.autograd.grad(loss(output), [leaf, *model.parameters()])
    return [output, *grads, *(() if shares is None else (shares,))]


PRECISIONS = [
    (torch.float64, False, {"rtol": 1e-12, "atol": 1e-14}),
    (torch.float32, False, {"rtol": 1e-5, "atol": 1e-7}),
    (torch.bfloat16, False, {"rtol": 0.1, "atol": 0.05}),
    (torch.float32, True, {"rtol": 0.1, "atol": 0.05}),
]


@pytest.mark.parametrize("name", CASES)
def test_refresh_step_computes_what_the_bare_model_computes(name):
    """And when it is over, by the module's own code; the factors are float32 at least."""
    for (dtype, autocast, tolerance), size in product(PRECISIONS, ((N, L, E), (L, E))):
        model = Model(**CASES[name]).to(dtype)
        bare = copy.deepcopy(model)
        x = torch.randn(size, dtype=dtype)
        if not model.attention.batch_first and len(size) > 2:
            x = x.transpose(0, 1)
        optimizer = THOR(model, lr=0.0, update_interval=1000)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for steps in (0, 1):
                assert refreshes(optimizer) == {steps}
                assert ("attention" in listened_to(model)) == (steps == 0)
                torch.testing.assert_close(passed(model, x), passed(bare, x), **tolerance)
                if not steps:
                    step(model(x)[0], optimizer)
        for factor in (f for layer in optimizer.curvature.values() for f in layer.factors()):
            assert factor.isfinite().all()
            assert factor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_evaluates_alike_with_and_without(norm_first, monkeypatch):
    """By the fused kernel on refreshes too: torch takes the slow way where a module has hooks."""
    layer = nn.TransformerEncoderLayer(
        E, HEADS, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    name = "_transformer_encoder_layer_fwd"
    calls, fused = [], getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args: calls.append(1) or fused(*args))
    bare = copy.deepcopy(layer)
    optimizer = THOR(layer, lr=0.0, update_interval=2, trace_thresholds=(0.0, 0.0))
    for i in range(3):
        x = torch.randn(N, L, E)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            calls.clear()
            training = mode is torch.enable_grad
            with mode():
                outputs = [one.train(training)(x) for one in (layer, bare)]
            torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
            assert len(calls) == (0 if training else 2)
        step(layer(x), optimizer)
        assert refreshes(optimizer) == {1 + i // 2}
    projections = {f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")}
    assert set(optimizer.curvature) == projections | {"linear1", "linear2"}
    for name in ("linear1", "self_attn.q_proj"):
        assert optimizer.curvature[name].rows_per_term == L
