"""What `divide_curvature=True` stores and sends: each block is kept by its owner alone, and collected in every step."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torch_thor.curvature import LayerCurvature
from torch_thor.training.reports.traffic import collectives_of_refresh, collectives_of_step, divided_among, own_bytes


@dataclass(frozen=True)
class DividedShare:
    """What one of many processes stores and sends.

    Args:
        processes: Number of processes.
        state_bytes: Size of the factors and inverses of the process that keeps most.
        sent: Bytes that it sends on a refresh in which all layers take new factors, beside those of every step.
        inverses_sent: Bytes that it sends in every step, to collect the inverses.
    """

    processes: int
    state_bytes: int
    sent: int
    inverses_sent: int


def divided_share(model: nn.Module, layers: Sequence[LayerCurvature], processes: int) -> DividedShare:
    """Compute what one of many processes stores and sends under DDP.

    Args:
        model: The model, whose parameters are in one group.
        layers: Its preconditioned layers.
        processes: Number of processes.

    Returns:
        The share.
    """
    kept, sent, inverses = [], 0, 0
    for rank in range(processes):
        with divided_among(layers, processes, rank):
            kept.append(own_bytes(layers))
            if not rank and processes > 1:
                sent = sum(one.sent(processes) for one in collectives_of_refresh(layers, processes))
                inverses = sum(one.sent(processes) for one in collectives_of_step(model.parameters(), layers))
    return DividedShare(processes, max(kept), sent, inverses)
