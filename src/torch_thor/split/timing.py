"""The time to invert all blocks of a model, and to orthogonalise, by split dimension.

It is that of a named device.
"""

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Cut, ieee_float32
from torch_thor.curvature.polar import unit_polars

# Each candidate is timed for about this long, and at least and at most this many times.
SECONDS_EACH = 2.0
REPEATS = (3, 25)


def inverse_seconds(
    sizes: Sequence[tuple[int, int]],
    split_dims: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, ...]:
    """Time the inversion of a model's blocks as in a refresh: a batched Cholesky per block size."""
    # sizes: (groups, rows) of each factor.
    # The time of a Cholesky factorisation does not depend on the values, so well-conditioned blocks
    # are used in the place of the factors.
    return _medians(partial(_invert_once, sizes, dtype=dtype, device=device), split_dims)


def orthogonal_seconds(
    shapes: Sequence[tuple[int, int, int]],
    split_dims: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, ...]:
    """Time the orthogonalisation of a model's matrices as in a step of ThorMuon."""
    # shapes: (groups, outputs, inputs) of each layer, whose matrices are laid wide.
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay
    matrices = [
        torch.randn((groups, *sorted(shape)), generator=generator, dtype=dtype, device=device)
        for groups, *shape in shapes
    ]
    return _medians(partial(_orthogonalise_once, matrices, device=device), split_dims)


def _medians(once: Callable[[int], float], split_dims: Sequence[int]) -> tuple[float, ...]:
    """Return the median of the seconds that ``once`` returns for each candidate."""
    # The candidates are measured in turns, so that changes in the speed of the machine affect all
    # of them alike; the first round is a warm-up.
    seconds: list[list[float]] = [[] for _ in split_dims]
    rounds = [1] * len(split_dims)
    for turn in range(REPEATS[1] + 1):
        for i, split_dim in enumerate(split_dims):
            if turn > rounds[i]:
                continue
            elapsed = once(split_dim)
            if turn:
                seconds[i].append(elapsed)
            else:
                rounds[i] = min(max(REPEATS[0], int(SECONDS_EACH / elapsed)), REPEATS[1])
    return tuple(statistics.median(times) for times in seconds)


def _invert_once(
    sizes: Sequence[tuple[int, int]], split_dim: int, *, dtype: torch.dtype, device: torch.device
) -> float:
    counts: Counter[int] = Counter()
    for groups, rows in sizes:
        for count, size in Cut.of(rows, split_dim, groups).blocks:
            counts[size] += count
    batches = [
        torch.eye(size, dtype=dtype, device=device).add(1 / size).repeat(count, 1, 1)
        for size, count in counts.items()
    ]

    def work() -> None:
        for batch in batches:
            invert(batch)

    with ieee_float32(device.type):
        return _seconds_of(work, device)


def _orthogonalise_once(matrices: list[Tensor], split_dim: int, *, device: torch.device) -> float:
    return _seconds_of(lambda: unit_polars(matrices, split_dim), device)


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return how long a device works."""
    _synchronise(device)
    started = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - started


def invert(blocks: Tensor) -> Tensor:
    """Return the inverses of blocks."""
    # Blocks of 1 x 1 too, although a refresh computes their reciprocals in much less time: p_1 is
    # the unit of the performance curve, and must be measured with the same algorithm.
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(blocks)[0])


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the name of a device, with the number of threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} of {platform.machine()}"
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}"


def processor_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
