"""Weights that are frozen, before or after the optimizer was made."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tiny import batches, listened_to, mlp, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(9)
BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])


def entries(optimizer):
    return {entry.name: entry for entry in optimizer.coverage()}


def build(make, **options):
    """A model whose middle layer is frozen, and its optimizer."""
    torch.manual_seed(0)
    model = mlp()
    model[2].requires_grad_(False)
    return model, make(model, **{"update_interval": 2, **options})


@BOTH
def test_a_frozen_layer_has_no_state_and_no_statistics(make):
    model, optimizer = build(make)
    assert listened_to(model) == {"0", "4"}
    train(model, optimizer, STREAM[:3])
    assert set(optimizer.state) == {*model[0].parameters(), *model[4].parameters()}
    assert not listened_to(model)
    for name in ("2.weight", "2.bias"):
        assert "frozen" in entries(optimizer)[name].reason
    covered = 63 if make is THOR else 53
    assert f"{covered} of 63 trained parameters, in 2 layers" in repr(optimizer)


@BOTH
def test_unfrozen_it_is_preconditioned_from_the_second_step_on(make):
    """After a plain step, as for a layer that is used late; it waits for no other's refresh."""
    model, optimizer = build(make, update_interval=100)
    train(model, optimizer, STREAM[:2])
    assert not listened_to(model)
    model[2].requires_grad_(True)
    before = model[2].weight.detach().clone()
    for i, refreshes in ((2, 0), (3, 1)):
        train(model, optimizer, STREAM[i : i + 1])
        assert not torch.equal(model[2].weight, before)
        found = {name: layer.refreshes for name, layer in optimizer.curvature.items()}
        assert found == {"0": 1, "2": refreshes, "4": 1}
    assert entries(optimizer)["2.weight"].preconditioned
    assert not listened_to(model)


def test_frozen_later_it_stands_still_and_keeps_its_state():
    """As for any optimizer of torch; thawed, it goes on with the inverses that it had."""
    model = mlp()
    optimizer = THOR(model, update_interval=2, trace_thresholds=(0.0, 0.0))
    train(model, optimizer, STREAM[:3])
    model[2].requires_grad_(False)
    before, state = weights(model), copy.deepcopy(optimizer.state[model[2].weight])
    train(model, optimizer, STREAM[3:6])
    assert torch.equal(model[2].weight, before["2.weight"])
    assert optimizer.curvature["2"].refreshes == 2
    for key, value in optimizer.state[model[2].weight].items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, state[key])
    model[2].requires_grad_(True)
    train(model, optimizer, STREAM[6:8])
    assert optimizer.curvature["2"].refreshes == 3


class Little(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bilinear = nn.Linear(4, 3), nn.Bilinear(4, 4, 3)
        self.table = nn.Parameter(torch.zeros(40, 4))


def test_a_warning_says_that_less_than_half_is_preconditioned():
    """It names the largest of the rest. What is frozen, in no group or left out does not count."""
    bilinear = r"bilinear.weight \(3, 4, 4\) \(plain momentum\): no curvature for Bilinear"
    with pytest.warns(UserWarning, match=rf"15 of 226.*7%.*table \(40, 4\).*{bilinear}") as said:
        THOR(Little())
    assert [w.filename for w in said] == [__file__]
    frozen, part = Little(), Little()
    frozen.table.requires_grad_(False)
    frozen.bilinear.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        THOR(frozen)
        THOR(part.linear.parameters(), model=part)
        THOR(mlp(), layers="4")
