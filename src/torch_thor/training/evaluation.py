"""The evaluation of a network, shared by all processes."""

import math

import torch
from torch import nn

from torch_thor.training.parallel import Ranks, release, share_buffers
from torch_thor.training.tasks.task import Task


def evaluate(task: Task, model: nn.Module, ranks: Ranks) -> dict[str, float]:
    """Evaluate a network on the whole held-out set, in evaluation mode, then restore its mode.

    All processes call it.

    Args:
        task: The task.
        model: The network without the wrapper of DDP, which would communicate in its forward
            passes.
        ranks: The process among those that share the set.

    Returns:
        The metrics of the task by name, bit for bit the same for any number of processes.
    """
    return counted(task, model, ranks)[0]


@torch.no_grad()
def counted(task: Task, model: nn.Module, ranks: Ranks) -> tuple[dict[str, float], int]:
    """Evaluate as `evaluate` does, and count the loss terms, such as the images that were read."""
    means = [metric for metric in task.metrics if metric.derived is None]
    names = list(
        dict.fromkeys(name for one in means for name in (one.name, one.over) if name is not None)
    )
    share_buffers(model, ranks)
    training, sums, terms = model.training, [], 0
    model.eval()
    try:
        for batch, counts in task.held_out(ranks):
            number = task.terms(batch).number
            if number:
                measured = task.measure(model, batch)
                if counts:
                    sums.append(torch.stack([measured[name].double() for name in names]))
                    terms += number
    finally:  # a caller may go on with the training after an error of the data or the task
        model.train(training)
        release(model)
    everywhere = ranks.gathered((torch.stack(sums).tolist() if sums else [], terms))
    total = sum(number for _, number in everywhere)
    # rounded once, so that a sum does not depend on which process had which batch
    totals = {
        name: math.fsum(row[i] for rows, _ in everywhere for row in rows)
        for i, name in enumerate(names)
    }
    found = {
        one.name: totals[one.name] / (total if one.over is None else totals[one.over])
        for one in means
    }
    metrics = {
        one.name: found[one.name] if one.derived is None else one.derived(found)
        for one in task.metrics
    }
    return metrics, total
