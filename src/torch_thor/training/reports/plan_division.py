"""How the curvature of a model is stored, divided and sent in data-parallel training, computed without running it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from torch_thor.curvature import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.distributed.ownership import deal_out, imbalance
from torch_thor.training.reports.traffic import blocks_of, collectives_of_refresh


@dataclass(frozen=True)
class Curvature:
    """What the curvature of a model takes in memory, on every process.

    Args:
        layers: Number of preconditioned layers.
        parameters: Number of trained elements of the model.
        gradient_bytes: Size of the gradients.
        state_bytes: Size of the factors and their inverses.
        statistics_bytes: Size of the sums over rows, which exist on steps that refresh.
    """

    layers: int
    parameters: int
    gradient_bytes: int
    state_bytes: int
    statistics_bytes: int


@dataclass(frozen=True)
class Share:
    """What one process does and sends on a refresh in which all layers take new factors.

    Args:
        processes: Number of processes.
        blocks: The largest number of blocks that a process inverts.
        imbalance: The most work of a process over the mean.
        sent: Bytes that a process sends on a refresh, with rings.
        sent_unsplit: The same with factors that are not split.
        gradients_sent: Bytes that a process sends for the gradients on every step, with a ring.
    """

    processes: int
    blocks: int
    imbalance: float
    sent: int
    sent_unsplit: int
    gradients_sent: int


def curvature_of(model: nn.Module, layers: Iterable[LayerCurvature]) -> Curvature:
    """Compute the sizes of factors, inverses and statistics.

    Args:
        model: The model.
        layers: Its preconditioned layers.

    Returns:
        The sizes.
    """
    layers = list(layers)
    state = statistics = 0
    by_rows: set[int] = set()  # weights whose layers share the factor of their rows
    for layer in layers:
        size, weight = factor_dtype(layer.weight.dtype).itemsize, id(layer.weight)
        for factor in layer.stored:
            statistics += size * factor.cut.rows * factor.cut.width  # as wide as the largest block
            if not factor.by_rows or weight not in by_rows:
                state += sum(size * math.prod(shape) for shape in factor.shapes().values())
        by_rows.add(weight)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Curvature(
        layers=len(layers),
        parameters=sum(p.numel() for p in trained),
        gradient_bytes=sum(p.nbytes for p in trained),
        state_bytes=state,
        statistics_bytes=statistics,
    )


def share_of(
    layers: Iterable[LayerCurvature], unsplit: Iterable[LayerCurvature], gradient_bytes: int, processes: int
) -> Share:
    """Compute what one process does and sends.

    Args:
        layers: The preconditioned layers.
        unsplit: Those of the same model, with factors that are not split.
        gradient_bytes: Size of the gradients.
        processes: Number of processes.

    Returns:
        The share.
    """
    layers = list(layers)
    shapes = tuple(one.shape for one in blocks_of(layers))
    blocks = [0] * processes
    for of_processes in deal_out(shapes, processes):
        for i in range(processes):
            blocks[i] += of_processes[i + 1] - of_processes[i]
    sent, sent_unsplit = (
        sum(one.sent(processes) for one in collectives_of_refresh(chosen, processes)) if processes > 1 else 0
        for chosen in (layers, unsplit)
    )
    ring = 2 * gradient_bytes * (processes - 1) // processes
    return Share(processes, max(blocks), imbalance(shapes, processes), sent, sent_unsplit, ring)
