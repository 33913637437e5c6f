"""The evaluation of a network, shared by all processes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.training.engine import parallel
from torch_thor.training.tasks.task import Batch, EvaluationTask


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    Args:
        metrics: The value of each metric of the task, by name.
        terms: Number of loss terms that were evaluated.
    """

    metrics: Mapping[str, float]
    terms: int


@torch.no_grad()
def evaluate(task: EvaluationTask, model: nn.Module, batches: Iterable[Batch]) -> Score:
    """Evaluate a model in evaluation mode, then restore its mode. All processes must call it.

    Args:
        task: The task.
        model: The network without a wrapper, which may communicate in each forward pass, because batches may be empty.
        batches: Batches on the model's device. Each sample is in the batches of one process only.

    Returns:
        The metrics over the samples of all processes.
    """
    measured_ones = [metric for metric in task.metrics() if metric.derived is None]
    names = list(dict.fromkeys(name for one in measured_ones for name in (one.name, one.over) if name is not None))
    sums: dict[str, list[Tensor]] = {name: [] for name in names}
    terms = 0
    was_training = model.training
    model.eval()
    for batch in batches:
        number = task.terms(batch).number
        if not number:
            continue
        measured = task.measure(model, batch)
        for name in names:
            sums[name].append(measured[name].double())
        terms += number
    model.train(was_training)
    own = {name: torch.stack(values).tolist() if values else [] for name, values in sums.items()}
    everywhere = parallel.gathered((own, terms))
    total = sum(number for _, number in everywhere)
    # rounded once, so that a sum does not depend on which process had which batch
    totals = {name: math.fsum(value for part, _ in everywhere for value in part[name]) for name in names}
    means = {one.name: totals[one.name] / (total if one.over is None else totals[one.over]) for one in measured_ones}
    values = {
        metric.name: means[metric.name] if metric.derived is None else metric.derived(means)
        for metric in task.metrics()
    }
    return Score(values, total)
