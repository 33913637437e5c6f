"""`nn.MultiheadAttention` computes what it computes without THOR, on refreshes and between them."""

import copy

import pytest
import torch
from torch import nn

from tiny import listened_to
from torch_thor import THOR

E, HEADS, N, L = 8, 2, 3, 4


class Model(nn.Module):
    """An attention between linear layers; returns the attention's weights too."""

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
    "separate": {"kdim": E, "vdim": E, "add_bias_kv": True, "add_zero_attn": True},
    "mask": {"call": {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1)}},
    "dropout": {"batch_first": True, "dropout": 0.4, "bias": False},
    "dropout_no_weights": {"dropout": 0.4, "call": {"need_weights": False}},
}
PRECISIONS = [
    (torch.float64, False, {"rtol": 1e-12, "atol": 1e-14}),
    (torch.float32, True, {"rtol": 0.1, "atol": 0.05}),
]


def step(output, optimizer):
    (output.float() ** 3).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def passed(model, x):
    """Output, attention weights, and gradients by all parameters and by the input."""
    torch.manual_seed(5)  # dropout draws the same numbers
    leaf = x.clone().requires_grad_()
    output, shares = model(leaf)
    grads = torch.autograd.grad((output**3).mean(), [leaf, *model.parameters()])
    return [output, *grads, *(() if shares is None else (shares,))]


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_a_refresh_computes_what_the_bare_model_computes(name):
    """The next step runs the module's own code."""
    for dtype, autocast, tolerance in PRECISIONS:
        model = Model(**CASES[name]).to(dtype)
        bare = copy.deepcopy(model)
        x = torch.randn(N, L, E, dtype=dtype)
        if not model.attention.batch_first:
            x = x.transpose(0, 1)
        optimizer = THOR(model, lr=0.0, update_interval=1000)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for steps in (0, 1):
                assert ("attention" in listened_to(model)) == (steps == 0)
                torch.testing.assert_close(passed(model, x), passed(bare, x), **tolerance)
                if not steps:
                    step(model(x)[0], optimizer)
        assert {layer.refreshes for layer in optimizer.curvature.values()} == {1}
