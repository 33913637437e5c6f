"""The recipes of the reference trainings: their numbers, by hand, and that each of them trains."""

import math

import pytest
import torch

from image_tree import write_tree
from torch_thor import AGCSGD, LAMB, THOR
from torch_thor.training import image_run as new_run
from torch_thor.training import load_recipe, recipe_names, train
from torch_thor.training.config.schedules import factor
from torch_thor.training.data import TrainingOrder, open_data
from torch_thor.training.optimizers import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
IMAGENET = 1_281_167
SHIPPED = [name for name in recipe_names() if name not in ("digits", "fashion-mnist")]


def values(recipe, key, steps):
    """The learning rate or the damping in steps counted from 1, and the steps of an epoch."""
    epoch = TrainingOrder(IMAGENET, recipe.batch_size, 0).batches
    schedule, start = {
        "lr": (recipe.schedule, recipe.optimizers[recipe.optimizer[0]].lr),
        "damping": (recipe.damping_schedule, getattr(recipe.optimizers["thor"], "damping", None)),
    }[key]
    return [start * factor(schedule, step - 1, epoch, epoch * recipe.epochs) for step in steps]


def test_45_epochs_of_the_reference():
    recipe = load_recipe("resnet50-imagenet-thor-8x32")
    assert TrainingOrder(IMAGENET, recipe.batch_size, 0).batches == 5004  # as the reference counts
    # lr = 0.05803 (1 - e/53)^4.0839, halved from epoch 39 on and again from 40: at the ends of epochs 1, 20, 39, 45
    by_hand = [
        0.05803 * (52 / 53) ** 4.0839,
        0.05803 * (33 / 53) ** 4.0839,
        0.05803 * (14 / 53) ** 4.0839 / 2,
        0.05803 * (8 / 53) ** 4.0839 / 4,
    ]
    assert values(recipe, "lr", [5004, 20 * 5004, 39 * 5004, 45 * 5004]) == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx([0.053686, 0.0083756, 0.00012639, 6.4216e-06], rel=1e-3)
    # damping = 0.03 · 0.50036^(e/10): halved, nearly, every ten epochs
    assert values(recipe, "damping", [5004 * 10, 5004 * 20]) == pytest.approx([0.0150108, 0.00751080], rel=1e-5)
    thor = recipe.optimizers["thor"]
    assert (thor.momentum, thor.weight_decay, thor.update_interval) == (0.9, 5e-4, 834)
    assert (recipe.label_smoothing, recipe.smoothing_form) == (0.1, "reference")
    assert (recipe.loss_scale, recipe.precision) == (128.0, "fp16")
    assert (recipe.epochs, recipe.batch_size, recipe.classes) == (45, 256, 1001)


@pytest.mark.parametrize("name", ["8x32", "8x32-40", "paper"])
def test_nothing_bounds_the_steps_of_the_reference(name):
    settings = load_recipe(f"resnet50-imagenet-thor-{name}").optimizers["thor"]
    optimizer = THOR(torch.nn.Linear(2, 2), kl_clip=settings.kl_clip, max_update_ratio=settings.max_update_ratio)
    assert {key: optimizer.param_groups[0][key] for key in ("kl_clip", "max_update_ratio")} == {
        "kl_clip": None,
        "max_update_ratio": None,
    }


def test_40_epochs_of_the_reference():
    recipe = load_recipe("resnet50-imagenet-thor-8x32-40")
    # 0.05672 (1 - e/50)^4.9687, halved at the end of epoch 39 and again at the end of epoch 40, where the training ends
    by_hand = [
        0.05672 * (49 / 50) ** 4.9687,
        0.05672 * (1 - (39 - 1 / 5004) / 50) ** 4.9687,
        0.05672 * (11 / 50) ** 4.9687 / 2,
        0.05672 * (10 / 50) ** 4.9687 / 4,
    ]
    steps = [5004, 39 * 5004 - 1, 39 * 5004, 40 * 5004]
    assert values(recipe, "lr", steps) == pytest.approx(by_hand, rel=1e-12)
    assert recipe.smoothing_form == "reference"
    assert values(recipe, "damping", [5004 * 10]) == pytest.approx([0.02345 * 0.5467], rel=1e-12)
    assert recipe.epochs == 40


def test_the_papers_own_training():
    recipe = load_recipe("resnet50-imagenet-thor-paper")
    by_hand = [0.045 * (69 / 70) ** 6, 0.045 * (50 / 70) ** 6, 0.045 * (31 / 70) ** 6 / 2, 0.045 * (25 / 70) ** 6 / 4]
    assert values(recipe, "lr", [5004, 20 * 5004, 39 * 5004, 45 * 5004]) == pytest.approx(by_hand, rel=1e-12)
    assert values(recipe, "damping", [10 * 5004, 20 * 5004]) == pytest.approx([0.0261, 0.022707], rel=1e-12)
    thor = recipe.optimizers["thor"]
    assert (thor.momentum, thor.weight_decay, thor.split_dim) == (0.9, 5e-4, 128)
    assert (recipe.label_smoothing, recipe.smoothing_form, recipe.classes) == (0.1, "reference", 1001)
    assert (recipe.epochs, recipe.batch_size) == (45, 256)
    (group,) = build_optimizer("thor", torch.nn.Linear(2, 2), thor).param_groups
    assert group["trace_thresholds"] == (0.01, 0.0)
    # 20 steps, growing by a tenth at each refresh, to one refresh an epoch from epoch 10 on
    interval = group["update_interval"]
    assert [interval(step) for step in (0, 20, 42, 49_839, 49_840, 200_000)] == [20, 22, 24, 5003, 5004, 5004]
    refreshes = [0]
    while (step := refreshes[-1] + interval(refreshes[-1])) < 45 * 5004:
        refreshes.append(step)
    assert len(refreshes) == 94


def test_sgd_falls_tenfold_after_30_and_60_epochs():
    steps = [1, 30 * 5004, 30 * 5004 + 1, 60 * 5004, 60 * 5004 + 1, 90 * 5004]
    assert values(load_recipe("resnet50-imagenet-sgd"), "lr", steps) == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_the_large_batch_warms_up_and_refreshes_as_often():
    recipe = load_recipe("resnet50-imagenet-8192")
    assert TrainingOrder(IMAGENET, recipe.batch_size, 0).batches == 156
    assert recipe.optimizers["thor"].update_interval * 6 == 156  # six an epoch, as 834 · 6 = 5004
    assert recipe.optimizers["thor"].lr == pytest.approx(0.05803 * math.sqrt(32), rel=1e-3)
    assert values(recipe, "lr", [78, 5 * 156])[0] == pytest.approx(0.328 / 10)  # a tenth of the way
    assert values(recipe, "lr", [5 * 156 + 1]) == pytest.approx([0.328])


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("recipes"))


@pytest.mark.parametrize("name", [name for name in SHIPPED if load_recipe(name).task == "image-classification"])
def test_every_recipe_of_images_trains(name, photographs):
    """On a few photographs of 32 pixels, with a small network in the place of a ResNet: data, precision, schedules."""
    small = {"resnet50": "small-resnet", "cifar-resnet18": "small-resnet", "nf_resnet50": "timm:test_nfnet"}
    model = load_recipe(name).model
    words = [
        "data.name=image-folder", f"data.root={photographs}", "data.transform.size=32", "data.transform.resize=36",
        "data.workers.count=0", "data.max_broken=0.2", "batch_size=9", "epochs=2",
        f"model={small.get(model.rpartition(':')[2], model)}",
        "schedule.horizon_epochs=null", "schedule.warmup_epochs=0.5", "schedule.milestones=[1]",
        "optimizers.thor.update_interval=2",
    ]  # fmt: skip
    recipe = load_recipe(name, words)
    said = []
    data = open_data(recipe.data, torch.device("cpu"), said.append)
    for optimizer in recipe.optimizer:
        run = new_run(recipe, optimizer, data)
        record = train(run)
        assert isinstance(
            run.optimizer, {"thor": THOR, "lamb": LAMB, "agc-sgd": AGCSGD}.get(optimizer, torch.optim.SGD)
        )
        assert record.steps[-1].step == 4
        assert all(math.isfinite(point.loss) for point in record.steps)
        assert not any(point.skipped for point in record.steps)
        assert math.isfinite(record.evaluations[-1].loss)
    assert len(said) == 2 * len(recipe.optimizer)  # the broken images, by name
