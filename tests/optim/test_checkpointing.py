"""Activation checkpointing of both kinds, and torch.func: the same statistics, or a clear error."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_thor import THOR


class Model(nn.Module):
    """An attention, a convolution and linear layers inside the part that is recomputed."""

    def __init__(self, mode=None):
        super().__init__()
        self.mode = mode
        self.embedding = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def inner(self, h):
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return torch.tanh(self.conv(h.mT)).mT

    def forward(self, x):
        h = self.embedding(x)
        h = self.inner(h) if self.mode is None else checkpoint(self.inner, h, use_reentrant=self.mode == "reentrant")
        return self.head(h)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_checkpointing_changes_nothing(mode, micro_batches):
    torch.manual_seed(0)
    plain = Model().double()
    recomputing = copy.deepcopy(plain)
    recomputing.mode = mode
    one = THOR(plain, update_interval=2, trace_thresholds=(0, 0))
    two = THOR(recomputing, update_interval=2, trace_thresholds=(0, 0))
    for _ in range(4):
        for _ in range(micro_batches):
            x = torch.randint(11, (4, 5))
            for model in (plain, recomputing):
                (model(x).square().mean() / micro_batches).backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    for name, curvature in one.curvature.items():
        assert curvature.rows_per_term == two.curvature[name].rows_per_term
        for left, right in zip(curvature.factors(), two.curvature[name].factors(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)
    for left, right in zip(plain.parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_functional_call_with_the_models_own_parameters():
    """Gradients land in .grad by backward(), so it is an ordinary step."""
    model = Model().double()
    optimizer = THOR(model, update_interval=1)
    torch.func.functional_call(model, dict(model.named_parameters()), torch.randint(11, (4, 5))).mean().backward()
    optimizer.step()
    assert {c.refreshes for c in optimizer.curvature.values()} == {1}


def test_gradients_of_torch_func_are_an_error_on_a_refresh_step_and_fine_between():
    model = Model().double()
    optimizer = THOR(model, update_interval=3)
    x = torch.randint(11, (4, 5))

    def loss(parameters):
        return torch.func.functional_call(model, parameters, x).square().mean()

    def functional_step():
        for name, gradient in torch.func.grad(loss)(dict(model.named_parameters())).items():
            model.get_parameter(name).grad = gradient.detach()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"inside a torch\.func transform.*loss\.backward\(\)"):
        functional_step()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    functional_step()
    assert optimizer.param_groups[0]["step"] == 2


def test_per_sample_gradients_beside_training():
    """vmap over grad, for looking at gradients, while THOR waits for statistics."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    optimizer = THOR(model)
    x = torch.randn(5, 4).double()

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, row).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)
    assert per_sample["0.weight"].shape == (5, 3, 4)
    model(x).square().mean().backward()
    optimizer.step()
    assert optimizer.curvature["0"].refreshes == 1
