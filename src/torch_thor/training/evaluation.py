"""The evaluation of a network, shared by all processes."""

import math
from collections.abc import Collection

import torch
from torch import nn

from torch_thor.curvature.blocks import widened
from torch_thor.training.parallel import Ranks, release, share_buffers
from torch_thor.training.tasks.task import Task


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, ranks: Ranks, stops: Collection[int] = ()
) -> tuple[dict[str, float], int] | None:
    """Evaluate a network on the whole held-out set, in evaluation mode, then restore its mode.

    All processes call it.

    Args:
        task: The task.
        model: The network without the wrapper of DDP, which would communicate in its forward
            passes.
        ranks: The process among those that share the set.
        stops: Becomes true (gets an element) when a signal asks this process to stop.

    Returns:
        The metrics of the task by name, bit for bit the same for any number of processes, and the
        number of loss terms, such as images; None if a signal has stopped one of them.
    """
    means = [metric for metric in task.metrics if metric.derived is None]
    names = [metric.name for metric in means]
    names += dict.fromkeys(metric.over for metric in means if metric.over is not None)
    share_buffers(model, ranks)
    training, sums, loss_terms = model.training, [], 0
    model.eval()
    for batch, counts in task.held_out(ranks):
        if stops:
            break
        number = task.terms(batch).number
        if number:
            measured = task.measure(model, batch)
            if counts:
                sums.append(torch.stack([widened(measured[name]) for name in names]))
                loss_terms += number
    model.train(training)
    release(model)
    rows = torch.stack(sums).tolist() if sums else []
    everywhere = ranks.gathered((rows, loss_terms, bool(stops)))
    if any(stopped for _, _, stopped in everywhere):
        return None
    total = sum(number for _, number, _ in everywhere)
    # Sums are rounded once, so that they do not depend on which process had which batch.
    totals = {
        name: math.fsum(row[i] for rows, _, _ in everywhere for row in rows)
        for i, name in enumerate(names)
    }
    values = {
        metric.name: totals[metric.name] / (total if metric.over is None else totals[metric.over])
        for metric in means
    }
    return {
        metric.name: values[metric.name] if metric.derived is None else metric.derived(values)
        for metric in task.metrics
    }, total
