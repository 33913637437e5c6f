"""Schedules against values worked out by hand: 10 steps an epoch, 4 epochs, 40 steps."""

import pytest
import torch

from torch_thor.errors import UserError
from torch_thor.training.recipe_model import Phase, Recipe, Schedule
from torch_thor.training.recipe_schedules import apply, check, factor

FACTORS = [
    ({"kind": "constant"}, {39: 1.0}),
    ({"kind": "linear"}, {10: 0.75}),
    ({"kind": "linear", "final": 0.2}, {20: 0.6}),
    ({"kind": "cosine"}, {20: 0.5, 30: (1 - 2**-0.5) / 2}),  # cos(3π/4) = -1/√2
    ({"kind": "exponential", "rate": 0.5}, {20: 0.25}),
    ({"kind": "cosine", "warmup_epochs": 0.5}, {0: 0.2, 5: 1.0}),
    ({"kind": "linear", "warmup_epochs": 2}, {30: 0.5}),
    ({"kind": "linear", "warmup_steps": 4}, {2: 0.75}),
    ({"kind": "linear", "horizon_epochs": 5}, {30: 0.4}),  # 30 of 50 steps
    ({"kind": "cosine", "horizon_steps": 80}, {20: (1 + 2**-0.5) / 2}),  # cos(π/4) = 1/√2
    ({"kind": "polynomial", "power": 2}, {10: 0.5625}),
    ({"kind": "polynomial", "power": 2, "final": 0.2}, {10: 0.65}),  # 0.2 + 0.8 · 0.5625
    ({"kind": "step", "milestones": (1, 3)}, {9: 1.0, 10: 0.1}),
    ({"kind": "step", "milestones": (1, 3), "gamma": 0.5}, {30: 0.25}),
    # milestones do not wait for warm-up
    ({"kind": "step", "milestones": (1, 3), "warmup_epochs": 2}, {9: 0.5, 10: 0.055}),
    ({"kind": "thor-lr"}, {19: 0.5, 39: 0.0}),  # counted from 1: after the 20th step e = 2 of 4
    ({"kind": "thor-lr", "decay": 2, "horizon_epochs": 8}, {39: 0.25}),
    # 7/8, halved; then halved twice, and never a third time
    ({"kind": "thor-lr", "horizon_steps": 80, "decay_epochs": 1}, {9: 0.4375, 39: 0.125}),
    # 7/8, half of the warm-up
    ({"kind": "thor-lr", "horizon_epochs": 8, "warmup_epochs": 2}, {9: 0.4375}),
    # e = 2.5, a quarter of ten epochs: 16^(-1/4)
    ({"kind": "thor-damping", "rate": 0.0625}, {24: 0.5}),
    ({"kind": "thor-damping", "rate": 0.0625, "warmup_epochs": 4}, {24: 0.3125}),
]


@pytest.mark.parametrize(("keys", "expected"), FACTORS)
def test_factors_by_hand(keys, expected):
    found = {step: factor(Schedule(**keys), step, 10, 40) for step in expected}
    assert found == pytest.approx(expected, abs=1e-12)


def sgd(**settings):
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1, **settings}]
    )


def values(recipe, key, steps, steps_per_epoch=10, **initial):
    """The learning rate or the damping of steps, each of which follows the one before."""
    optimizer, found = sgd(**initial), []
    for step in steps:
        apply(optimizer, recipe, step, steps_per_epoch)
        found.append(optimizer.param_groups[0][key])
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [0.22, 0.07]), ("cosine", [0.22, 0.07]), ("polynomial", [0.13, 0.055])],
)
def test_every_group_starts_from_its_own_value_and_ends_at_the_same(kind, expected):
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1, "damping": 2.0}]
    optimizer = torch.optim.SGD(groups)
    lrs, halved = {"kind": kind, "end": 0.04, "power": 2}, {"kind": "exponential", "rate": 0.5}
    for _ in range(3):
        apply(optimizer, Recipe(epochs=4, schedule=lrs, damping_schedule=halved), 20, 10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
    assert [group.get("damping") for group in optimizer.param_groups] == [None, 0.5]


def test_a_phase_goes_on_with_the_schedule_of_the_whole_training_or_begins_its_own():
    linear = Schedule(kind="linear")
    recipe = Recipe(phases=(Phase(steps=2), Phase(steps=2, lr_factor=0.5)), schedule=linear)
    assert values(recipe, "lr", range(4), 4, lr=0.8) == pytest.approx([0.8, 0.6, 0.2, 0.1])
    second = Schedule(kind="linear", warmup_epochs=0.5, end=0.1)  # 2 of its 4 steps
    first = Phase(steps=3, schedule=linear)
    phases = (first, Phase(steps=4, lr_factor=0.5, schedule=second))
    recipe = Recipe(phases=phases, damping_schedule=linear)
    # 0.8 (1 - t / 3); then 0.4 after a warm-up of two steps, from there to 0.1
    expected = [0.8, 1.6 / 3, 0.8 / 3, 0.2, 0.4, 0.4, 0.25]
    assert values(recipe, "lr", range(7), 7, lr=0.8) == pytest.approx(expected)
    found = values(recipe, "damping", range(7), 7, damping=2.0)
    assert found == pytest.approx([2 * (1 - t / 7) for t in range(7)])
    recipe = Recipe(phases=(first, first))  # equal ones are told apart
    assert values(recipe, "lr", range(6), 6, lr=0.6) == pytest.approx([0.6, 0.4, 0.2] * 2)


@pytest.mark.parametrize(
    ("key", "keys", "said"),
    [
        ("schedule", {"kind": "thor-lr", "horizon_epochs": 3.9},
         "horizon_epochs=3.9 is shorter than the training (40 steps), and thor-lr"),
        ("damping_schedule", {"kind": "polynomial", "horizon_steps": 39},
         "horizon_steps=39 is shorter than the"),
        ("schedule", {"warmup_epochs": 4.5},
         "warmup_epochs=4.5 is longer than the training (40 steps): shorten"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit_are_refused(key, keys, said):
    with pytest.raises(UserError) as caught:
        check(sgd(damping=0.03), Recipe(epochs=4, **{key: keys}), 10)
    assert str(caught.value).startswith(f"{key}.{said}")


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "thor-lr", "horizon_epochs": 4},
        {"kind": "exponential", "rate": 0.5, "horizon_epochs": 1},  # it has no horizon
        {"kind": "step", "milestones": [30, 60]},
        {"kind": "linear", "end": 0.1, "warmup_epochs": 4},
        {"kind": "linear"},  # the last step is not yet at 0
    ],
)
def test_schedules_that_fit_stay_above_zero_to_the_end(keys):
    without_damping = {"damping_schedule": {"kind": "linear", "horizon_steps": 3}}
    recipe = Recipe(epochs=4, schedule=keys, **without_damping)
    check(sgd(), recipe, 10)
    *before, last = values(recipe, "lr", range(40))
    assert min(before) > 0 <= last
