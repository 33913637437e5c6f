"""The layers of a model as the first of many processes would hold them under FSDP2, and what that process stores."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.curvature import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.curvature.shards import RowShards, shard_bounds, why_not_by_rows
from torch_thor.distributed.ownership import imbalance
from torch_thor.training.reports.plan_times import parameter_collectives
from torch_thor.training.reports.traffic import blocks_of, collectives_of_refresh


@dataclass(frozen=True)
class ShardedShare:
    """What the first of many processes stores and sends under FSDP2.

    Args:
        processes: Number of processes.
        parameter_bytes: Size of its rows of the weights. Gradients and momentum take as much each.
        state_bytes: Size of its factors and inverses.
        statistics_bytes: Size of the sums over rows, which exist on steps that refresh.
        imbalance: The most work of a process over the mean.
        sent: Bytes that it sends on a refresh, with rings.
        weights_sent: Bytes that it sends for weights and gradients on every step, with rings.
    """

    processes: int
    parameter_bytes: int
    state_bytes: int
    statistics_bytes: int
    imbalance: float
    sent: int
    weights_sent: int

    @property
    def memory(self) -> int:
        """Weights, gradients, momentum, factors and inverses of the process."""
        return 3 * self.parameter_bytes + self.state_bytes


def sharded_share(
    model: nn.Module, layers: Iterable[LayerCurvature], gradient_bytes: int, processes: int
) -> ShardedShare:
    """Compute what the first process stores and sends.

    Args:
        model: The model.
        layers: Its layers, as `shard_layers` returns them.
        gradient_bytes: Size of the gradients of the whole model.
        processes: Number of processes.

    Returns:
        The share.
    """
    layers = list(layers)
    blocks = blocks_of(layers)
    collectives = collectives_of_refresh(layers, processes) if processes > 1 else []
    every_step = parameter_collectives(gradient_bytes, processes, sharded=True)
    return ShardedShare(
        processes=processes,
        parameter_bytes=sharded_parameter_bytes(model, processes),
        state_bytes=stored_bytes(layers, processes),
        statistics_bytes=sum(one.dtype.itemsize * one.shape[0] * one.shape[1] ** 2 for one in blocks),
        imbalance=imbalance([one.shape for one in blocks], processes, [one.owners for one in blocks]),
        sent=sum(one.sent(processes) for one in collectives),
        weights_sent=sum(one.sent(processes) for one in every_step),
    )


def shard_layers(layers: Iterable[LayerCurvature], processes: int) -> list[LayerCurvature]:
    """Divide the rows of all weights as `fully_shard` does, without any process.

    Args:
        layers: The layers of a model; they are changed, and can be divided again among another number of processes.
        processes: Number of processes.

    Returns:
        Those layers that are preconditioned under FSDP2, as the first process has them: it never has fewer rows than
        another one.
    """
    found = []
    for layer in layers:
        view = layer.weight_view
        shape = tuple(layer.weight.shape)
        if why_not_by_rows(layer.kind, shape) is not None:
            continue
        bounds = shard_bounds(shape[0], processes)
        shards = RowShards(processes, bounds, slice(0, bounds[1]), 0, _total, _exchange, _whole)
        view.bind(view.state, view.options, layer.weight, shards)
        layer.bind()
        found.append(layer)
    return found


def stored_bytes(layers: Iterable[LayerCurvature], processes: int) -> int:
    """Compute the size of factors and inverses on the first process.

    Args:
        layers: The layers under FSDP2. A factor of rows is stored with the rows of the process, and as many columns as
            the largest block of the whole factor has; the other factor is whole on every process.
        processes: Number of processes.

    Returns:
        Bytes.
    """
    size = 0
    by_rows: set[int] = set()  # weights whose layers share the factor of their rows
    for layer in layers:
        item = factor_dtype(layer.weight.dtype).itemsize
        for factor in layer.stored:
            for rows, columns in factor.shapes().values():
                if not factor.by_rows:
                    size += item * rows * columns
                elif id(layer.weight) not in by_rows:
                    size += item * -(-rows // processes) * columns
        by_rows.add(id(layer.weight))
    return size


def sharded_parameter_bytes(model: nn.Module, processes: int) -> int:
    """Compute the size of the rows of all trained parameters on the first process.

    Args:
        model: The model.
        processes: Number of processes.

    Returns:
        Bytes.
    """
    size = 0
    for p in model.parameters():
        if p.requires_grad:
            rows = p.shape[0] if p.dim() else 1
            size += p.element_size() * -(-rows // processes) * (p.numel() // max(rows, 1))
    return size


def _total(own: Tensor | None) -> Tensor:
    return torch.zeros(()) if own is None else own


def _exchange(_: Tensor, __: list[int], ___: list[int]) -> Tensor:
    raise NotImplementedError("nothing is sent while a plan is made")


def _whole(own: Tensor) -> Tensor:
    return own
