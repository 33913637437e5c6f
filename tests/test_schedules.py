"""The reference's schedules: their published values, and damping that is driven as torch drives
lr.
"""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torch_thor import THOR, ThorMuon
from torch_thor.schedules import LambdaDamping, polynomial, resnet50_damping, resnet50_lr

EPOCH = 5004  # steps, of 256 images


def test_the_formulas_are_those_of_the_design():
    for step in (
        0,
        1,
        833,
        EPOCH - 1,
        38 * EPOCH,
        39 * EPOCH - 2,
        39 * EPOCH - 1,
        40 * EPOCH - 1,
        45 * EPOCH,
    ):
        e = (step + 1) / EPOCH
        halved = 0.25 if e >= 40 else 0.5 if e >= 39 else 1.0
        assert resnet50_lr(step, EPOCH) == pytest.approx(
            0.05803 * (1 - e / 53) ** 4.0839 * halved, rel=1e-12
        )
        assert resnet50_damping(step, EPOCH) == pytest.approx(0.03 * 0.50036 ** (e / 10), rel=1e-12)
    assert resnet50_lr(53 * EPOCH, EPOCH) == 0.0  # and no complex number
    assert resnet50_lr(39 * EPOCH, EPOCH, decay_epochs=None) == 4 * 0.5 * resnet50_lr(
        39 * EPOCH, EPOCH
    )
    values = [
        polynomial(step, 30_000, start=7.035e-3, end=1e-6, power=4)
        for step in (0, 15_000, 30_000, 40_000)
    ]
    assert values == pytest.approx([7.035e-3, 1e-6 + 7.034e-3 / 16, 1e-6, 1e-6], rel=1e-12)


@pytest.mark.parametrize("kind", [THOR, ThorMuon])
def test_damping_follows_its_lambda_as_lr_does(kind):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "damping": 0.5}, {"params": model[1].parameters()}]
    optimizer = kind(groups, model=model, damping=0.2, lr=0.2)
    lr = LambdaLR(optimizer, lambda step: 0.5**step)
    damping = LambdaDamping(optimizer, lambda step: 0.5**step)
    for step in range(4):
        assert damping.get_last_damping() == pytest.approx([0.5 * 0.5**step, 0.2 * 0.5**step])
        assert damping.get_last_damping()[1] == pytest.approx(lr.get_last_lr()[1])
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lr.step()
        damping.step()
    saved, state = damping.state_dict(), optimizer.state_dict()
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    again = kind(groups, model=model)
    again.load_state_dict(state)
    resumed = LambdaDamping(again, lambda step: 0.5**step)
    resumed.load_state_dict(saved)
    again.load_state_dict(state)  # the constructor has set the damping of step 0
    for scheduler in (damping, resumed):
        scheduler.step()
    assert resumed.get_last_damping() == damping.get_last_damping()
    assert math.isclose(damping.get_last_damping()[0], 0.5 * 0.5**5)


def test_what_is_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"LambdaDamping\(SGD\).*must have a damping; give THOR"):
        LambdaDamping(torch.optim.SGD(model.parameters(), lr=0.1), lambda step: 1.0)
    with pytest.raises(ValueError, match="2 functions for 1 parameter groups; give one"):
        LambdaDamping(THOR(model), [lambda step: 1.0] * 2)


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def test_a_group_that_is_added_later_starts_at_the_present_step():
    """Where each group has a function of its own there is none for it: it keeps its damping."""
    for several in (False, True):
        model = two_layers()
        optimizer = THOR(model[0].parameters(), model=model, damping=0.5)
        function = [lambda step: 0.5**step] if several else lambda step: 0.5**step
        damping = LambdaDamping(optimizer, function)
        damping.step()
        optimizer.add_param_group({"params": model[1].parameters(), "damping": 0.25})
        assert damping.get_last_damping() == [0.25, 0.25]
        damping.step()
        assert damping.get_last_damping() == [0.125, 0.25 if several else 0.0625]
        saved = damping.state_dict()
        assert saved == {"last_epoch": 2, "base_dampings": [0.5, 0.25]}
        model = two_layers()
        other = THOR(model[0].parameters(), model=model, damping=0.5)
        resumed = LambdaDamping(other, function)
        with pytest.raises(
            ValueError, match=r"has 1 parameter groups and had 2 when the state .* add"
        ):
            resumed.load_state_dict(saved)
        assert resumed.state_dict() == {"last_epoch": 0, "base_dampings": [0.5]}
        other.add_param_group({"params": model[1].parameters(), "damping": 0.25})
        resumed.load_state_dict(saved)
        other.load_state_dict(optimizer.state_dict())
        for schedule in (damping, resumed):
            schedule.step()
        assert resumed.get_last_damping() == damping.get_last_damping()
        resumed.load_state_dict({"last_epoch": 1, "base_dampings": [0.5]})  # before it was added
        resumed.step()
        assert resumed.get_last_damping()[0] == 0.125


def test_a_function_that_fails_has_changed_nothing():
    model = two_layers()
    groups = [{"params": layer.parameters()} for layer in model]

    def fails(step):
        if step == 2:
            raise RuntimeError("the user's own")
        return 0.5**step

    optimizer = THOR(groups, model=model, damping=0.5)
    damping = LambdaDamping(optimizer, [lambda step: 0.5**step, fails])
    damping.step()
    with pytest.raises(RuntimeError, match="the user's own"):
        damping.step()
    assert damping.get_last_damping() == [0.25, 0.25]
    assert damping.state_dict() == {"last_epoch": 1, "base_dampings": [0.5, 0.5]}
    del optimizer.param_groups[1]
    with pytest.raises(ValueError, match="has 1 parameter groups and had 2 when this schedule"):
        damping.step()
    assert damping.get_last_damping() == [0.25]


def test_what_a_function_returns_is_checked_before_anything_is_changed():
    model = two_layers()
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = THOR(groups, model=model, damping=0.5)
    for wrong in (None, "half", [0.5]):
        functions = [lambda step: 0.5**step, lambda step, wrong=wrong: wrong if step else 1.0]
        damping = LambdaDamping(optimizer, functions)
        with pytest.raises(ValueError, match=r"returned .* for step 1: it must return the factor"):
            damping.step()
        assert damping.get_last_damping() == [0.5, 0.5]
        assert damping.last_epoch == 0


def test_functions_and_state_dicts_of_another_kind_are_refused():
    optimizer = THOR(two_layers(), damping=0.5)
    for wrong in (3, [3], [None]):
        with pytest.raises(ValueError, match=r"damping_lambda=.*must be a function .*or a list"):
            LambdaDamping(optimizer, wrong)
    assert "initial_damping" not in optimizer.param_groups[0]
    damping = LambdaDamping(optimizer, lambda step: 0.5**step)
    other = LambdaLR(optimizer, lambda step: 1.0).state_dict()
    with pytest.raises(ValueError, match=r"not the state dict of a LambdaDamping.*'base_lrs'"):
        damping.load_state_dict(other)
    assert damping.state_dict() == {"last_epoch": 0, "base_dampings": [0.5]}
