"""The evaluation of a network, shared by all processes."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.training.engine import parallel, sharding
from torch_thor.training.engine.batch_trees import to_device
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
        model: The network without the wrapper of DDP, which may communicate in each forward pass, because batches may
            be empty. A network that is divided among the processes computes as many batches on each of them.
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
    full = (batch for batch in batches if task.terms(batch).number)
    shares = _in_step(full, task.device) if sharding.is_divided(model) else ((one, True) for one in full)
    try:
        for batch, counts in shares:
            measured = task.measure(model, batch)
            if not counts:
                continue
            for name in names:
                sums[name].append(measured[name].double())
            terms += task.terms(batch).number
    finally:  # a caller may go on with the training after an error of the data or the task
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


def _in_step(batches: Iterator[Batch], device: torch.device) -> Iterator[tuple[Batch, bool]]:
    """Give every process as many batches as the one that has most, because each of their forward passes communicates.

    A process that has no more repeats its latest batch, which does not count, and one that has none borrows one.

    Args:
        batches: The batches of this process, each with at least one loss term.
        device: The device of the batches.

    Yields:
        A batch, and whether it counts.
    """
    latest = None
    while True:
        batch = next(batches, None)
        have = parallel.gathered((batch is not None, latest is not None))
        if not any(one for one, _ in have):
            return
        counts = batch is not None
        if not all(map(any, have)):  # only in the first round
            lent = parallel.gathered(to_device(batch, torch.device("cpu")) if counts else None)
            latest = to_device(next(one for one in lent if one is not None), device)
        latest = batch if counts else latest
        yield latest, counts
