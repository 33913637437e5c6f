"""Weights that are frozen, thawed, pruned or parametrised after the optimizer was made."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

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
    named = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    covered = sum(n for name, n in named.items() if make is THOR or name.endswith("weight"))
    assert f"{covered} of {sum(named.values())} trained parameters, in 2 layers" in repr(optimizer)


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
        self.table, self.small, self.other = map(nn.Parameter, map(torch.zeros, ((40, 4), 2, 3)))


def test_a_warning_says_that_less_than_half_is_preconditioned():
    """It names the largest of the rest. What is frozen, in no group or left out does not count."""
    bilinear = r"bilinear.weight \(3, 4, 4\) \(plain momentum\): no curvature for Bilinear"
    with pytest.warns(
        UserWarning, match=rf"15 of 231.*6%.*table \(40, 4\).*{bilinear}.*2 more"
    ) as said:
        THOR(Little())
    assert [w.filename for w in said] == [__file__]
    frozen, part = Little(), Little()
    frozen.table.requires_grad_(False)
    frozen.bilinear.requires_grad_(False)
    two = nn.ModuleDict({"body": nn.Linear(9, 9), "head": nn.Linear(3, 3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        THOR(frozen)
        THOR(part.linear.parameters(), model=part)
        THOR(two, layers="head")
        ThorMuon(mlp())


CHANGES = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.4),
    "spectral_norm": parametrizations.spectral_norm,
}


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_is_computed_from_then_on_is_trained_plainly(make, change):
    """From before the first step, and after a refresh."""
    for steps in (0, 4):
        torch.manual_seed(0)
        model = mlp()
        optimizer = make(model, update_interval=3)
        train(model, optimizer, STREAM[:steps])
        CHANGES[change](model[2])
        names = [name for name, _ in model.named_parameters()]
        assert list(entries(optimizer)) == names
        before = weights(model)
        train(model, optimizer, STREAM[steps:])
        assert all(not before[name].equal(value) for name, value in weights(model).items())
        assert set(optimizer.curvature) == {"0", "4"}
        assert all(layer.refreshes >= 2 for layer in optimizer.curvature.values())
