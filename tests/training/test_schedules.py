"""Schedules against values worked out by hand: 10 steps an epoch, 4 epochs, 40 steps."""

import pytest
import torch

from torch_thor.training.errors import UserError
from torch_thor.training.schedules import ScheduleSpec, apply, factor


@pytest.mark.parametrize(
    ("spec", "step", "expected"),
    [
        (ScheduleSpec("constant"), 39, 1.0),
        (ScheduleSpec("linear"), 0, 1.0),
        (ScheduleSpec("linear"), 10, 0.75),
        (ScheduleSpec("linear", final=0.2), 20, 0.6),
        (ScheduleSpec("cosine"), 0, 1.0),
        (ScheduleSpec("cosine"), 20, 0.5),
        (ScheduleSpec("cosine"), 30, (1 - 2**-0.5) / 2),  # cos(3π/4) = -1/√2
        (ScheduleSpec("cosine", final=0.1), 20, 0.55),
        (ScheduleSpec("exponential", rate=0.5), 20, 0.25),
        (ScheduleSpec("exponential", rate=0.5), 5, 2**-0.5),
        (ScheduleSpec("cosine", warmup_epochs=0.5), 0, 0.2),
        (ScheduleSpec("cosine", warmup_epochs=0.5), 4, 1.0),
        (ScheduleSpec("cosine", warmup_epochs=0.5), 5, 1.0),
        (ScheduleSpec("linear", warmup_epochs=2), 30, 0.5),
        (ScheduleSpec("exponential", rate=0.5, warmup_epochs=1), 20, 0.5),
    ],
)
def test_factor_by_hand(spec, step, expected):
    assert factor(spec, step, steps_per_epoch=10, total_steps=40) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "named"),
    [({"kind": "cosin"}, "cosin"), ({"warmup_epochs": -1}, "-1"), ({"final": 2}, "final=2"), ({"rate": 0}, "rate=0")],
)
def test_wrong_schedules_are_refused(values, named):
    with pytest.raises(UserError, match=named):
        ScheduleSpec(**values)


def test_apply_scales_from_the_first_value_and_leaves_other_groups_alone():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1, "damping": 2.0}])
    for _ in range(3):
        apply(optimizer, "lr", 0.5)
        apply(optimizer, "damping", 0.25)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"], second["damping"]) == (0.2, 0.05, 0.5)
    assert "damping" not in first
