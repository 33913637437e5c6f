"""Schedules against values worked out by hand: 10 steps an epoch, 4 epochs, 40 steps."""

import pytest
import torch
import yaml

from torch_thor.errors import UserError
from torch_thor.training.recipe_model import Phase, Recipe, Schedule
from torch_thor.training.recipe_schedules import apply, check, factor

FACTORS = [
    ({"kind": "constant"}, 39, 1.0),
    ({"kind": "linear"}, 10, 0.75),
    ({"kind": "linear", "final": 0.2}, 20, 0.6),
    ({"kind": "cosine"}, 20, 0.5),
    ({"kind": "cosine"}, 30, (1 - 2**-0.5) / 2),  # cos(3π/4) = -1/√2
    ({"kind": "cosine", "final": 0.1}, 20, 0.55),
    ({"kind": "exponential", "rate": 0.5}, 20, 0.25),
    ({"kind": "exponential", "rate": 0.5}, 5, 2**-0.5),
    ({"kind": "cosine", "warmup_epochs": 0.5}, 0, 0.2),
    ({"kind": "cosine", "warmup_epochs": 0.5}, 5, 1.0),
    ({"kind": "linear", "warmup_epochs": 2}, 30, 0.5),
    ({"kind": "linear", "warmup_steps": 4}, 2, 0.75),
    ({"kind": "constant", "warmup_epochs": 2}, 4, 0.25),
    ({"kind": "linear", "horizon_epochs": 5}, 30, 0.4),  # 30 of 50 steps
    ({"kind": "cosine", "horizon_steps": 80}, 20, (1 + 2**-0.5) / 2),  # cos(π/4) = 1/√2
    ({"kind": "polynomial", "power": 2}, 10, 0.5625),
    ({"kind": "polynomial", "power": 2, "final": 0.2}, 10, 0.65),  # 0.2 + 0.8 · 0.5625
    ({"kind": "polynomial", "power": 2, "warmup_epochs": 2}, 30, 0.25),
    ({"kind": "step", "milestones": (1, 3)}, 9, 1.0),
    ({"kind": "step", "milestones": (1, 3)}, 10, 0.1),
    ({"kind": "step", "milestones": (1, 3), "gamma": 0.5}, 30, 0.25),
    ({"kind": "step", "milestones": (0.5,)}, 5, 0.1),
    ({"kind": "step", "milestones": (1, 3), "warmup_epochs": 2}, 9, 0.5),  # 10 of 20 warm-up steps
    # milestones do not wait for warm-up
    ({"kind": "step", "milestones": (1, 3), "warmup_epochs": 2}, 10, 0.055),
    ({"kind": "thor-lr"}, 19, 0.5),  # counted from 1: after the 20th step e = 2 of 4
    ({"kind": "thor-lr"}, 39, 0.0),
    ({"kind": "thor-lr", "decay": 2, "horizon_epochs": 8}, 39, 0.25),
    ({"kind": "thor-lr", "horizon_steps": 80, "decay_epochs": 1}, 8, 0.8875),  # e = 0.9 of 8
    ({"kind": "thor-lr", "horizon_steps": 80, "decay_epochs": 1}, 9, 0.4375),  # 7/8, halved
    ({"kind": "thor-lr", "horizon_steps": 80, "decay_epochs": 1}, 19, 0.1875),  # 6/8, halved twice
    # and never a third time
    ({"kind": "thor-lr", "horizon_steps": 80, "decay_epochs": 1}, 39, 0.125),
    # 7/8, half of the warm-up
    ({"kind": "thor-lr", "horizon_epochs": 8, "warmup_epochs": 2}, 9, 0.4375),
    # e = 2.5, a quarter of ten epochs: 16^(-1/4)
    ({"kind": "thor-damping", "rate": 0.0625}, 24, 0.5),
    ({"kind": "thor-damping", "rate": 0.0625, "warmup_epochs": 4}, 24, 0.3125),
]


@pytest.mark.parametrize(("keys", "step", "expected"), FACTORS)
def test_factors_by_hand(keys, step, expected):
    found = factor(Schedule(**keys), step, steps_per_epoch=10, total_steps=40)
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


# 8 devices with 32 images each: 5004 steps an epoch, 45 epochs; E 53, halved from epoch 39 and
# again from 40. (1 - e / 53)^4.0839 and 0.50036^(e / 10) were worked out with 40 decimal digits.
RESNET50 = {
    1: (0.0580291064230158, 0.0299995848785078),
    2502: (0.0558265674786074, 0.0289791327223692),
    5004: (0.0536869091732382, 0.0279930044446897),
    195155: (0.0002526852831370, 0.0020152519092096),  # the last step of full size
    195156: (0.0001263352767176, 0.0020152240233969),  # e = 39
    200159: (0.0000933496882436, 0.0018804318550558),
    200160: (0.0000466719140359, 0.0018804058347999),  # e = 40
    225180: (0.0000064261602772, 0.0013301263042177),  # e = 45, the last one
}


def test_resnet50_with_thor_by_hand():
    lrs = Schedule(kind="thor-lr", decay=4.0839, decay_epochs=39, horizon_epochs=53)
    recipe = Recipe(
        epochs=45, schedule=lrs, damping_schedule=Schedule(kind="thor-damping", rate=0.50036)
    )
    for number, key in enumerate(("lr", "damping")):
        found = values(recipe, key, [t - 1 for t in RESNET50], 5004, lr=0.05803, damping=0.03)
        assert found == pytest.approx(
            [both[number] for both in RESNET50.values()], abs=1e-16, rel=1e-12
        )


def test_every_group_starts_from_its_own_value_and_ends_at_the_same():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD(
        [{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1, "damping": 2.0}]
    )
    halved = Schedule(kind="exponential", rate=0.5)
    for kind, expected in (
        ("linear", [0.22, 0.07]),
        ("cosine", [0.22, 0.07]),
        ("polynomial", [0.13, 0.055]),
    ):
        for _ in range(3):
            recipe = Recipe(
                epochs=4, schedule=Schedule(kind=kind, end=0.04, power=2), damping_schedule=halved
            )
            apply(optimizer, recipe, 20, 10)  # half way
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
        assert [group.get("damping") for group in optimizer.param_groups] == [None, 0.5]


def test_a_phase_goes_on_with_the_schedule_of_the_whole_training_or_begins_its_own():
    recipe = Recipe(
        phases=(Phase(steps=2), Phase(steps=2, lr_factor=0.5)), schedule=Schedule(kind="linear")
    )
    assert values(recipe, "lr", range(4), 4, lr=0.8) == pytest.approx([0.8, 0.6, 0.2, 0.1])
    second = Schedule(kind="linear", warmup_epochs=0.5, end=0.1)  # 2 of its 4 steps
    first = Phase(steps=3, schedule=Schedule(kind="linear"))
    recipe = Recipe(
        phases=(first, Phase(steps=4, lr_factor=0.5, schedule=second)),
        damping_schedule=Schedule(kind="linear"),
    )
    # 0.8 (1 - t / 3); then 0.4 after a warm-up of two steps, from there to 0.1
    assert values(recipe, "lr", range(7), 7, lr=0.8) == pytest.approx(
        [0.8, 1.6 / 3, 0.8 / 3, 0.2, 0.4, 0.4, 0.25]
    )
    found = values(recipe, "damping", range(7), 7, damping=2.0)
    assert found == pytest.approx([2 * (1 - t / 7) for t in range(7)])
    recipe = Recipe(phases=(first, first))  # equal ones are told apart
    assert values(recipe, "lr", range(6), 6, lr=0.6) == pytest.approx([0.6, 0.4, 0.2] * 2)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "schedule={kind: thor-lr, horizon_epochs: 3.9}",
            "schedule.horizon_epochs=3.9 is shorter than the training (40 steps), and thor-lr",
        ),
        (
            "damping_schedule={kind: polynomial, horizon_steps: 39}",
            "damping_schedule.horizon_steps=39 is shorter than the",
        ),
        (
            "schedule={warmup_epochs: 4.5}",
            "schedule.warmup_epochs=4.5 is longer than the training (40 steps): shorten",
        ),
        ("schedule={kind: thor-lr, horizon_epochs: 4}", None),
        ("schedule={kind: exponential, rate: 0.5, horizon_epochs: 1}", None),  # it has no horizon
        ("schedule={kind: step, milestones: [30, 60]}", None),
        ("schedule={kind: linear, end: 0.1, warmup_epochs: 4}", None),
        ("damping_schedule={kind: linear}", None),  # the last step is not yet at 0
    ],
)
def test_schedules_that_fit_stay_above_zero_to_the_end_and_others_are_refused(word, said):
    key, value = word.split("=")
    recipe = Recipe(epochs=4, **{key: yaml.safe_load(value)})
    if said is not None:
        with pytest.raises(UserError) as caught:
            check(sgd(damping=0.03), recipe, 10)
        assert str(caught.value).startswith(said)
        return
    check(sgd(damping=0.03), recipe, 10)
    for key in ("lr", "damping"):
        seen = values(recipe, key, range(40), damping=0.03)
        assert all(value > 0 for value in seen[:-1])
        assert seen[-1] >= 0


def test_a_schedule_of_the_damping_is_checked_where_there_is_a_damping():
    recipe = Recipe(epochs=4, damping_schedule=Schedule(kind="linear", horizon_steps=3))
    check(sgd(), recipe, 10)
