"""Evaluating a network over all processes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.training.engine import parallel
from torch_thor.training.tasks.task import Batch, EvaluationTask


@dataclass(frozen=True)
class Score:
    """What an evaluation gives.

    Args:
        metrics: Value of each of the task's metrics, by name.
        terms: Loss terms that they are means over.
    """

    metrics: Mapping[str, float]
    terms: int


@torch.no_grad()
def evaluate(task: EvaluationTask, model: nn.Module, batches: Iterable[Batch]) -> Score:
    """Evaluate a model, together with all processes; its training mode is put back as it was.

    Args:
        task: The task.
        model: The network itself: a wrapper may communicate in each forward pass, and batches may be empty.
        batches: Batches on the model's device; each sample in one process alone.

    Returns:
        The metrics over all samples of all processes.
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
    # rounded once, so that a sum does not hang on which process had which batch
    whole = {name: math.fsum(value for part, _ in everywhere for value in part[name]) for name in names}
    means = {one.name: whole[one.name] / (total if one.over is None else whole[one.over]) for one in measured_ones}
    values = {
        metric.name: means[metric.name] if metric.derived is None else metric.derived(means)
        for metric in task.metrics()
    }
    return Score(values, total)
