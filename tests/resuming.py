"""Trainings that are stopped and go on, without a command line: what the tests of checkpoints and averages share."""

import pytest
import torch
from torch import nn

from torch_thor.training import Callback, image_run, recipe_yaml, train
from torch_thor.training.callbacks import MetricsFile
from torch_thor.training.checkpoints import Checkpoints, StopSignal, newest_whole, restore
from torch_thor.training.models import BasicBlock


class Noisy(nn.Module):
    """Batch statistics, dropout and a buffer of whole numbers: running averages and random numbers matter."""

    def __init__(self, in_channels, classes):
        super().__init__()
        self.body = BasicBlock(in_channels, 4, stride=2)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(64, classes)

    def forward(self, images):
        return self.head(self.drop(self.body(images).flatten(1)))


class StopAt(Callback):
    """The signal to stop, in a given step."""

    def __init__(self, step, stop):
        self.step, self.stop = step, stop

    def after_step(self, run, point):
        self.stop.received = point.step == self.step


def go(folder, recipe, name, data, *, resume=False, stop_at=None, keep=2):
    """Train with one optimizer, with a checkpoint every five steps; gives the run."""
    folder.mkdir(exist_ok=True)
    run = image_run(recipe, name, data)
    stop, metrics = StopSignal(), MetricsFile(folder / "metrics.jsonl")
    if resume:
        torch.manual_seed(999)  # another process: nothing of the first one's random numbers is left
        restore(run, newest_whole(folder / "checkpoints", pytest.fail), metrics.path, pytest.fail)
    checkpoints = Checkpoints(
        folder / "checkpoints", metrics, stop, interval=5, keep=keep, optimizer=name, recipe=recipe_yaml(recipe)
    )
    try:
        train(run, [StopAt(stop_at, stop), metrics, checkpoints])
    finally:
        metrics.close()
    return run
