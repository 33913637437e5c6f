"""The recipes of the reference trainings and of BERT: their numbers, by hand."""

import math

import pytest
import torch

from torch_thor.training.optimizers import build_optimizer
from torch_thor.training.recipe_schedules import apply, check, factor
from torch_thor.training.recipes import load_recipe

EPOCH = {256: 5004, 8192: 156, 1024: 1251}  # steps, as the reference counts those of ImageNet


def recipe_and_settings(name):
    recipe = load_recipe(name)
    return recipe, recipe.optimizers[recipe.optimizer[0]]


def values(recipe, key, steps, epoch=None):
    """The learning rate or the damping of the first optimizer in steps counted from 0."""
    settings = recipe.optimizers[recipe.optimizer[0]]
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": settings["lr"]}
    optimizer = torch.optim.SGD(
        [{**group, **{k: settings[k] for k in ("damping",) if k in settings}}]
    )
    epoch, found = epoch or EPOCH.get(recipe.batch_size) or recipe.total_steps(1), []
    check(optimizer, recipe, epoch)
    for step in steps:
        apply(optimizer, recipe, step, epoch)
        found.append(optimizer.param_groups[0][key])
    return found


def ends(*epochs, epoch=5004):
    return [number * epoch - 1 for number in epochs]


def test_45_epochs_of_the_reference():
    recipe, thor = recipe_and_settings("resnet50-imagenet-thor-8x32")
    # lr = 0.05803 (1 - e/53)^4.0839, halved from epoch 39 on and again from 40: at the ends of
    # epochs 1, 20, 39, 45
    by_hand = [
        0.05803 * (52 / 53) ** 4.0839, 0.05803 * (33 / 53) ** 4.0839,
        0.05803 * (14 / 53) ** 4.0839 / 2, 0.05803 * (8 / 53) ** 4.0839 / 4,
    ]  # fmt: skip
    assert values(recipe, "lr", ends(1, 20, 39, 45)) == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx([0.053686, 0.0083756, 0.00012639, 6.4216e-06], rel=1e-3)
    # damping = 0.03 · 0.50036^(e/10): halved, nearly, every ten epochs
    assert values(recipe, "damping", ends(10, 20)) == pytest.approx(
        [0.0150108, 0.00751080], rel=1e-5
    )
    assert (thor["momentum"], thor["weight_decay"], thor["update_interval"]) == (0.9, 5e-4, 834)
    assert (recipe.label_smoothing, recipe.smoothing_form, recipe.classes) == (
        0.1,
        "reference",
        1001,
    )
    assert (recipe.loss_scale, recipe.precision, recipe.epochs, recipe.batch_size) == (
        128.0,
        "fp16",
        45,
        256,
    )


def test_40_epochs_of_the_reference():
    recipe = load_recipe("resnet50-imagenet-thor-8x32-40")
    # 0.05672 (1 - e/50)^4.9687, halved at the end of epoch 39 and again at the end of epoch 40,
    # where the training ends
    by_hand = [
        0.05672 * (49 / 50) ** 4.9687, 0.05672 * (1 - (39 - 1 / 5004) / 50) ** 4.9687,
        0.05672 * (11 / 50) ** 4.9687 / 2, 0.05672 * (10 / 50) ** 4.9687 / 4,
    ]  # fmt: skip
    assert values(recipe, "lr", [5003, 39 * 5004 - 2, *ends(39, 40)]) == pytest.approx(
        by_hand, rel=1e-12
    )
    assert values(recipe, "damping", ends(10)) == pytest.approx([0.02345 * 0.5467], rel=1e-12)
    assert (recipe.smoothing_form, recipe.epochs) == ("reference", 40)


def test_the_papers_own_training():
    recipe, thor = recipe_and_settings("resnet50-imagenet-thor-paper")
    by_hand = [
        0.045 * (69 / 70) ** 6,
        0.045 * (50 / 70) ** 6,
        0.045 * (31 / 70) ** 6 / 2,
        0.045 * (25 / 70) ** 6 / 4,
    ]
    assert values(recipe, "lr", ends(1, 20, 39, 45)) == pytest.approx(by_hand, rel=1e-12)
    assert values(recipe, "damping", ends(10, 20)) == pytest.approx([0.0261, 0.022707], rel=1e-12)
    assert (thor["momentum"], thor["weight_decay"], thor["split_dim"]) == (0.9, 5e-4, 128)
    form = (recipe.label_smoothing, recipe.smoothing_form, recipe.classes, recipe.epochs)
    assert form == (0.1, "reference", 1001, 45)
    (group,) = build_optimizer("thor", torch.nn.Linear(2, 2), thor).param_groups
    assert (group["trace_thresholds"], group["kl_clip"], group["max_update_ratio"]) == (
        (0.01, 0.0),
        None,
        None,
    )
    # 20 steps, growing by a tenth at each refresh, to one refresh an epoch from epoch 10 on
    interval = group["update_interval"]
    assert [interval(step) for step in (0, 20, 42, 49_839, 49_840, 200_000)] == [
        20,
        22,
        24,
        5003,
        5004,
        5004,
    ]
    refreshes = [0]
    while (step := refreshes[-1] + interval(refreshes[-1])) < 45 * 5004:
        refreshes.append(step)
    assert len(refreshes) == 94


def test_sgd_falls_tenfold_after_30_and_60_epochs():
    steps = [step for epoch in (30, 60) for step in (epoch * 5004 - 1, epoch * 5004)]
    recipe = load_recipe("resnet50-imagenet-sgd")
    assert values(recipe, "lr", [0, *steps, *ends(90)]) == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_the_large_batch_warms_up_and_refreshes_as_often():
    recipe, thor = recipe_and_settings("resnet50-imagenet-8192")
    assert thor["update_interval"] * 6 == 156  # six an epoch, as 834 · 6 = 5004
    assert thor["lr"] == pytest.approx(0.05803 * math.sqrt(32), rel=1e-3)
    # a tenth of the way
    assert values(recipe, "lr", [77, 5 * 156]) == pytest.approx([0.328 / 10, 0.328])


def test_bert_large_with_thor():
    recipe, thor = recipe_and_settings("bert-large-thor")
    # from lr to 1e-6 with the square of what is left of 30,000 steps, from damping to 1e-6 with its
    # fourth power
    steps = [0, 3000, 15000, 29999]
    lrs = [0.006464, 1e-6 + 0.006463 * 0.81, 1e-6 + 0.006463 / 4, 1e-6 + 0.006463 / 9e8]
    dampings = [0.007035, 1e-6 + 0.007034 * 0.6561, 1e-6 + 0.007034 / 16, 1e-6]
    assert values(recipe, "lr", steps) == pytest.approx(lrs, rel=1e-12)
    assert values(recipe, "damping", steps) == pytest.approx(dampings, rel=1e-12)
    assert (thor["momentum"], thor["weight_decay"], thor["update_interval"]) == (0.9, 1e-5, 100)
    assert thor["trace_thresholds"] == "thor_nt"
    assert (recipe.batch_size, recipe.steps, recipe.data.text.length, recipe.phases) == (
        96,
        30_000,
        512,
        (),
    )
    # as published: 3,000 steps of the same schedules
    published = load_recipe("bert-large-thor", ["steps=3000"])
    assert values(published, "lr", [2999], 3000) == values(recipe, "lr", [2999])


def test_bert_large_with_the_schedules_that_were_published_first():
    recipe, thor = recipe_and_settings("bert-large-thor-linear")
    steps = [0, 3000, 15000]
    assert values(recipe, "lr", steps) == pytest.approx(
        [0.0031, 1e-6 + 0.003099 * 0.9, 1e-6 + 0.003099 / 2], rel=1e-12
    )
    assert values(recipe, "damping", steps) == pytest.approx(
        [0.05, 1e-6 + 0.049999 * 0.9, 1e-6 + 0.049999 / 2]
    )
    assert (thor["momentum"], thor["weight_decay"], thor["update_interval"]) == (0.9, 5e-4, 10)


def test_bert_large_with_lamb():
    recipe, lamb = recipe_and_settings("bert-large-lamb")
    phases = [
        (phase.steps, phase.length, phase.batch_size or recipe.batch_size)
        for phase in recipe.phases
    ]
    assert phases == [(7038, 128, 65_536), (1563, 512, 32_768)]
    first, second = 2001, 200  # 0.2843 of 7038 steps, 0.128 of 1563
    for phase, lr, warmup in zip(recipe.phases, (0.006, 0.004), (first, second), strict=True):
        steps = [0, warmup - 1, warmup, phase.steps - 1]
        found = [
            lamb["lr"] * phase.lr_factor * factor(phase.schedule, t, phase.steps, phase.steps)
            for t in steps
        ]
        expected = [lr / warmup, lr, lr, lr * math.sqrt(1 / (phase.steps - warmup))]
        assert found == pytest.approx(expected, rel=1e-9)
        assert values(
            recipe, "lr", [t + (phase.steps == 1563) * 7038 for t in steps]
        ) == pytest.approx(found, rel=1e-12)
    assert (lamb["weight_decay"], recipe.clip_norm, recipe.activation_checkpointing) == (
        0.01,
        1.0,
        True,
    )
    examples = [steps * size for steps, _, size in phases]
    assert examples[0] / sum(examples) == pytest.approx(0.9, abs=0.001)


def test_bert_base_and_babylm():
    recipe, adamw = recipe_and_settings("bert-base")
    phases = [(phase.steps, phase.length or recipe.data.text.length) for phase in recipe.phases]
    assert phases == [(900_000, 128), (100_000, 512)]
    steps = [0, 4999, 9999, 10_000, 505_000, 999_999]
    lrs = [1e-8, 5e-5, 1e-4, 1e-4, 5e-5, 1e-4 / 990_000]
    assert values(recipe, "lr", steps, 1_000_000) == pytest.approx(lrs)
    assert (adamw, recipe.clip_norm) == ({"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-6}, 1.0)
    recipe = load_recipe("bert-babylm")
    lrs = [2.5e-4, 5e-4, 5e-4, 2.5e-4, 5e-4 / 9400]
    assert values(recipe, "lr", [299, 599, 600, 5300, 9999]) == pytest.approx(lrs)
    assert (recipe.steps, recipe.batch_size, recipe.data.text.length) == (10_000, 64, 128)
