"""Schedules, and the rates and dampings of the published recipes, against values by hand."""

import math

import pytest
import torch

from torch_thor.errors import UserError
from torch_thor.training.recipe_model import Phase, Recipe, Schedule
from torch_thor.training.recipe_schedules import apply, check, factor
from torch_thor.training.recipes import load_recipe

FACTORS = [  # of 4 epochs with 10 steps each
    ({"kind": "constant"}, {39: 1.0}),
    ({"kind": "cosine"}, {20: 0.5, 30: (1 - 2**-0.5) / 2}),  # cos(3π/4) = -1/√2
    ({"kind": "exponential", "rate": 0.5}, {20: 0.25}),
    ({"kind": "cosine", "warmup_epochs": 0.5}, {0: 0.2, 5: 1.0}),
    ({"kind": "linear", "warmup_epochs": 2}, {30: 0.5}),
    ({"kind": "linear", "horizon_epochs": 5}, {30: 0.4}),  # 30 of 50 steps
    ({"kind": "cosine", "horizon_steps": 80}, {20: (1 + 2**-0.5) / 2}),  # cos(π/4) = 1/√2
    ({"kind": "polynomial", "power": 2, "final": 0.2}, {10: 0.65}),  # 0.2 + 0.8 · 0.5625
    ({"kind": "step", "milestones": (1, 3)}, {9: 1.0, 10: 0.1}),
    ({"kind": "step", "milestones": (1, 3), "gamma": 0.5}, {30: 0.25}),
    # milestones do not wait for warm-up
    ({"kind": "step", "milestones": (1, 3), "warmup_epochs": 2}, {9: 0.5, 10: 0.055}),
    ({"kind": "thor-lr"}, {19: 0.5, 39: 0.0}),  # counted from 1: after the 20th step e = 2 of 4
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
    """The learning rate or the damping in each of these steps."""
    optimizer, found = sgd(**initial), []
    check(optimizer, recipe, steps_per_epoch)
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


def test_a_phase_follows_the_schedule_of_the_training_or_its_own():
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
    recipe = Recipe(phases=(first, first))  # equal phases are told apart
    assert values(recipe, "lr", range(6), 6, lr=0.6) == pytest.approx([0.6, 0.4, 0.2] * 2)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kind": "thor-lr", "horizon_epochs": 3.9}, "horizon_epochs=3.9 is shorter than the tr"),
        ({"warmup_epochs": 4.5}, "warmup_epochs=4.5 is longer than the training .40 steps.: sho"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(keys, said):
    with pytest.raises(UserError, match=said):
        check(sgd(), Recipe(epochs=4, schedule=keys), 10)


EPOCH = 5004  # steps with 256 images of ImageNet, as the reference counts them
THOR_45 = "resnet50-imagenet-thor-8x32"
PAPER, SGD = "resnet50-imagenet-thor-paper", "resnet50-imagenet-sgd"
LAMB_STEPS = (0, 2000, 2001, 7037, 7038, 7237, 7238, 8600)


def ends(*epochs):
    return [number * EPOCH - 1 for number in epochs]


@pytest.mark.parametrize(
    ("name", "key", "epoch", "steps", "expected"),
    [
        # lr = 0.05803 (1 - e/53)^4.0839, halved from epoch 39 on and again from 40
        (THOR_45, "lr", EPOCH, ends(1, 20, 39, 45),
         [0.05803 * (52 / 53) ** 4.0839, 0.05803 * (33 / 53) ** 4.0839,
          0.05803 * (14 / 53) ** 4.0839 / 2, 0.05803 * (8 / 53) ** 4.0839 / 4]),
        # damping = 0.03 · 0.50036^(e/10): halved, nearly, every ten epochs
        (THOR_45, "damping", EPOCH, ends(10, 20), [0.03 * 0.50036, 0.03 * 0.50036**2]),
        (PAPER, "lr", EPOCH, ends(1, 20, 39, 45),
         [0.045 * (69 / 70) ** 6, 0.045 * (50 / 70) ** 6,
          0.045 * (31 / 70) ** 6 / 2, 0.045 * (25 / 70) ** 6 / 4]),
        (PAPER, "damping", EPOCH, ends(10, 20), [0.0261, 0.022707]),
        # tenfold less after 30 and 60 epochs
        (SGD, "lr", EPOCH, [0, *ends(30), 30 * EPOCH, *ends(60), 60 * EPOCH, *ends(90)],
         [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]),
        # a tenth of the way, and the end of the warm-up to 0.05803 √32
        ("resnet50-imagenet-8192", "lr", 156, [77, 5 * 156], [0.0328, 0.328]),
        # from lr to 1e-6 with the square of the share of the steps that is left, from damping to
        # 1e-6 with the fourth power of this share
        ("bert-large-thor", "lr", 30_000, [0, 3000, 15_000, 29_999],
         [0.006464, 1e-6 + 0.006463 * 0.81, 1e-6 + 0.006463 / 4, 1e-6 + 0.006463 / 9e8]),
        ("bert-large-thor", "damping", 30_000, [0, 3000, 15_000, 29_999],
         [0.007035, 1e-6 + 0.007034 * 0.6561, 1e-6 + 0.007034 / 16, 1e-6]),
        # phases of 7038 and 1563 steps: warm-ups of 2001 and 200, then the root of the share left
        ("bert-large-lamb", "lr", 8601, LAMB_STEPS,
         [0.006 / 2001, 0.006, 0.006, 0.006 * math.sqrt(1 / 5037),
          0.004 / 200, 0.004, 0.004, 0.004 * math.sqrt(1 / 1363)]),
        ("bert-base", "lr", 1_000_000, [0, 4999, 9999, 10_000, 505_000, 999_999],
         [1e-8, 5e-5, 1e-4, 1e-4, 5e-5, 1e-4 / 990_000]),
        ("bert-babylm", "lr", 10_000, [299, 599, 600, 5300, 9999],
         [2.5e-4, 5e-4, 5e-4, 2.5e-4, 5e-4 / 9400]),
    ],
)  # fmt: skip
def test_rates_and_dampings_of_published_recipes_by_hand(name, key, epoch, steps, expected):
    recipe = load_recipe(name)
    settings = recipe.optimizers[recipe.optimizer[0]]
    initial = {option: settings[option] for option in ("lr", "damping") if option in settings}
    assert values(recipe, key, steps, epoch, **initial) == pytest.approx(expected, rel=1e-9)
