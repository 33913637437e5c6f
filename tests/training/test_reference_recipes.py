"""The recipes of the reference trainings and of BERT: their numbers, by hand."""

import math

import pytest
import torch

from torch_thor.training.optimizers import build_optimizer
from torch_thor.training.recipe_schedules import apply, check
from torch_thor.training.recipes import load_recipe

EPOCH = 5004  # steps, as the reference counts those of 256 images of ImageNet
THOR_45, THOR_40 = "resnet50-imagenet-thor-8x32", "resnet50-imagenet-thor-8x32-40"
PAPER, SGD = "resnet50-imagenet-thor-paper", "resnet50-imagenet-sgd"
LAMB_STEPS = (0, 2000, 2001, 7037, 7038, 7237, 7238, 8600)


def values(recipe, key, steps, epoch):
    """The learning rate or the damping of the first optimizer in steps counted from 0."""
    settings, found = recipe.optimizers[recipe.optimizer[0]], []
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": settings["lr"]}
    group |= {"damping": settings["damping"]} if "damping" in settings else {}
    optimizer = torch.optim.SGD([group])
    check(optimizer, recipe, epoch)
    for step in steps:
        apply(optimizer, recipe, step, epoch)
        found.append(optimizer.param_groups[0][key])
    return found


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
        # 0.05672 (1 - e/50)^4.9687, halved at the ends of epochs 39 and 40, where it ends
        (THOR_40, "lr", EPOCH, [5003, 39 * 5004 - 2, *ends(39, 40)],
         [0.05672 * (49 / 50) ** 4.9687, 0.05672 * (1 - (39 - 1 / 5004) / 50) ** 4.9687,
          0.05672 * (11 / 50) ** 4.9687 / 2, 0.05672 * (10 / 50) ** 4.9687 / 4]),
        (THOR_40, "damping", EPOCH, ends(10), [0.02345 * 0.5467]),
        (PAPER, "lr", EPOCH, ends(1, 20, 39, 45),
         [0.045 * (69 / 70) ** 6, 0.045 * (50 / 70) ** 6,
          0.045 * (31 / 70) ** 6 / 2, 0.045 * (25 / 70) ** 6 / 4]),
        (PAPER, "damping", EPOCH, ends(10, 20), [0.0261, 0.022707]),
        # tenfold less after 30 and 60 epochs
        (SGD, "lr", EPOCH, [0, *ends(30), 30 * EPOCH, *ends(60), 60 * EPOCH, *ends(90)],
         [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]),
        # a tenth of the way, and the end of the warm-up to 0.05803 √32
        ("resnet50-imagenet-8192", "lr", 156, [77, 5 * 156], [0.0328, 0.328]),
        # from lr to 1e-6 with the square of what is left of 30,000 steps, from damping to 1e-6 with
        # its fourth power
        ("bert-large-thor", "lr", 30_000, [0, 3000, 15_000, 29_999],
         [0.006464, 1e-6 + 0.006463 * 0.81, 1e-6 + 0.006463 / 4, 1e-6 + 0.006463 / 9e8]),
        ("bert-large-thor", "damping", 30_000, [0, 3000, 15_000, 29_999],
         [0.007035, 1e-6 + 0.007034 * 0.6561, 1e-6 + 0.007034 / 16, 1e-6]),
        ("bert-large-thor-linear", "lr", 30_000, [0, 3000, 15_000],
         [0.0031, 1e-6 + 0.003099 * 0.9, 1e-6 + 0.003099 / 2]),
        ("bert-large-thor-linear", "damping", 30_000, [0, 3000, 15_000],
         [0.05, 1e-6 + 0.049999 * 0.9, 1e-6 + 0.049999 / 2]),
        # phases of 7038 and 1563 steps: warm-ups of 2001 and 200, then the root of what is left
        ("bert-large-lamb", "lr", 8601, LAMB_STEPS,
         [0.006 / 2001, 0.006, 0.006, 0.006 * math.sqrt(1 / 5037),
          0.004 / 200, 0.004, 0.004, 0.004 * math.sqrt(1 / 1363)]),
        ("bert-base", "lr", 1_000_000, [0, 4999, 9999, 10_000, 505_000, 999_999],
         [1e-8, 5e-5, 1e-4, 1e-4, 5e-5, 1e-4 / 990_000]),
        ("bert-babylm", "lr", 10_000, [299, 599, 600, 5300, 9999],
         [2.5e-4, 5e-4, 5e-4, 2.5e-4, 5e-4 / 9400]),
    ],
)  # fmt: skip
def test_rates_and_dampings_by_hand(name, key, epoch, steps, expected):
    assert values(load_recipe(name), key, steps, epoch) == pytest.approx(expected, rel=1e-9)


SMOOTHED = {"label_smoothing": 0.1, "smoothing_form": "reference", "classes": 1001, "epochs": 45}


@pytest.mark.parametrize(
    ("name", "keys", "settings"),
    [
        (THOR_45, SMOOTHED | {"loss_scale": 128.0, "precision": "fp16", "batch_size": 256},
         {"momentum": 0.9, "weight_decay": 5e-4, "update_interval": 834}),
        (THOR_40, SMOOTHED | {"epochs": 40}, {}),
        (PAPER, SMOOTHED, {"momentum": 0.9, "weight_decay": 5e-4, "split_dim": 128}),
        # six refreshes an epoch, as 834 · 6 = 5004
        ("resnet50-imagenet-8192", {}, {"update_interval": 156 // 6}),
        ("bert-large-thor", {"batch_size": 96, "steps": 30_000, "phases": ()},
         {"momentum": 0.9, "weight_decay": 1e-5, "update_interval": 100,
          "trace_thresholds": "thor_nt"}),
        ("bert-large-thor-linear", {},
         {"momentum": 0.9, "weight_decay": 5e-4, "update_interval": 10}),
        ("bert-large-lamb", {"clip_norm": 1.0, "activation_checkpointing": True},
         {"weight_decay": 0.01}),
        ("bert-base", {"clip_norm": 1.0}, {"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-6}),
        ("bert-babylm", {"steps": 10_000, "batch_size": 64}, {}),
    ],
)  # fmt: skip
def test_settings_by_hand(name, keys, settings):
    recipe = load_recipe(name)
    assert {key: getattr(recipe, key) for key in keys} == keys
    own = recipe.optimizers[recipe.optimizer[0]]
    assert {key: own[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert-large-thor", [(None, 512, 96)]),
        ("bert-large-lamb", [(7038, 128, 65_536), (1563, 512, 32_768)]),
        ("bert-base", [(900_000, 128, 256), (100_000, 512, 256)]),
        ("bert-babylm", [(None, 128, 64)]),
    ],
)
def test_lengths_of_the_examples_of_bert(name, expected):
    recipe = load_recipe(name)
    length, size = recipe.data.text.length, recipe.batch_size
    phases = [(one.steps, one.length or length, one.batch_size or size) for one in recipe.phases]
    assert (phases or [(None, length, size)]) == expected


def test_the_papers_refreshes_grow_from_20_steps_by_a_tenth_each_to_one_an_epoch():
    settings = load_recipe(PAPER).optimizers["thor"]
    (group,) = build_optimizer("thor", torch.nn.Linear(2, 2), settings).param_groups
    assert group["trace_thresholds"] == (0.01, 0.0)
    assert (group["kl_clip"], group["max_update_ratio"]) == (None, None)
    interval, refreshes = group["update_interval"], [0]
    found = [interval(step) for step in (0, 20, 42, 49_839, 49_840, 200_000)]
    assert found == [20, 22, 24, 5003, 5004, 5004]
    while (step := refreshes[-1] + interval(refreshes[-1])) < 45 * 5004:
        refreshes.append(step)
    assert len(refreshes) == 94


def test_bert_large_as_published_is_3000_steps_of_the_same_schedules():
    whole, published = (
        load_recipe("bert-large-thor"),
        load_recipe("bert-large-thor", ["steps=3000"]),
    )
    for key in ("lr", "damping"):
        assert values(published, key, [2999], 3000) == values(whole, key, [2999], 30_000)
