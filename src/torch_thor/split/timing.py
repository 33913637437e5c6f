"""How long a refresh takes to invert all blocks of a model, for each way to cut its factors."""

import statistics
import time
from collections.abc import Sequence

import torch

from torch_thor.curvature.blocks import BlockDiagonal, BlockLayout
from torch_thor.curvature.inverse import damped_inverses

# A candidate is timed again until it has used this much, and at least and at most so often.
SECONDS_EACH = 2.0
REPEATS = (3, 25)


def inverse_seconds(
    sizes: Sequence[tuple[int, int]], split_dims: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> tuple[float, ...]:
    """Measure the inversion of all blocks of a model, as a refresh inverts them.

    The candidates take turns, so that a machine whose speed drifts slows them alike; the first round warms up. The
    numbers inside do not change the time of a Cholesky factorisation, so well-conditioned blocks stand for the
    factors.

    Args:
        sizes: ``(groups, rows)`` of every factor of the model.
        split_dims: the candidates.
        dtype: dtype of the factors.
        device: where to measure.

    Returns:
        The median in seconds, one a candidate.
    """
    seconds: list[list[float]] = [[] for _ in split_dims]
    rounds = [1] * len(split_dims)
    for turn in range(REPEATS[1] + 1):
        for i, split_dim in enumerate(split_dims):
            if turn > rounds[i]:
                continue
            elapsed = _invert_once(sizes, split_dim, dtype, device)
            if turn:
                seconds[i].append(elapsed)
            else:
                rounds[i] = min(max(REPEATS[0], int(SECONDS_EACH / elapsed)), REPEATS[1])
    return tuple(statistics.median(times) for times in seconds)


def _invert_once(sizes: Sequence[tuple[int, int]], split_dim: int, dtype: torch.dtype, device: torch.device) -> float:
    factors = []
    for groups, rows in sizes:
        factor = BlockDiagonal.zeros(BlockLayout.of(groups, rows, split_dim), dtype=dtype, device=device)
        for part in factor.parts():
            part.fill_(1 / rows)
        factors.append((factor, 1.0))
    _synchronise(device)
    started = time.perf_counter()
    damped_inverses(factors)
    _synchronise(device)
    return time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
