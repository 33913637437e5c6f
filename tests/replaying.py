"""A finished record told to callbacks again, step by step, as a training tells it."""

import torch
from torch import nn

from torch_thor.training import EvalPoint, Run
from torch_thor.training.data import DataBundle
from torch_thor.training.tasks import ImageClassification


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def small_run(config, make=sgd, examples=12, task=ImageClassification):
    """A run of one linear layer, always the same."""
    torch.manual_seed(config.seed)
    data = DataBundle(
        torch.randn(examples, 4), torch.randint(3, (examples,)), torch.randn(6, 4), torch.arange(6) % 3, 3
    )
    model = nn.Linear(4, 3)
    return Run(model, make(model), task(data, config), config)


def accuracy_point(step, seconds, loss, top1, top5, *averaged):
    """An evaluation of a classifier, perhaps of averaged weights too: loss, top-1, top-5."""
    names = ("loss", "top1", "top5")
    average = dict(zip(names, averaged, strict=True)) if averaged and averaged[1] is not None else None
    return EvalPoint(step, seconds, {"loss": loss, "top1": top1, "top5": top5}, average)


def replay(callback, run, record, start=0):
    """Tell a callback what a run did after `start` steps; before that it was another process's."""
    run.record, run.step = record.up_to(start), start
    callback.before_training(run)
    later = record.since(start)
    for point in later.steps:
        run.record, run.step = record.up_to(point.step), point.step
        callback.after_step(run, point)
        if refreshes := [p for p in later.refreshes if p.step == point.step]:
            callback.after_refresh(run, refreshes)
        for evaluation in (p for p in later.evaluations if p.step == point.step):
            callback.after_evaluation(run, evaluation)
        callback.at_boundary(run)
    callback.after_training(run)
