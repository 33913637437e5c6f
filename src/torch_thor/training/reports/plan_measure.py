"""Measures on this device what `torch-thor plan` predicts times from."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from torch_thor import THOR, ThorMuon, __version__
from torch_thor.curvature import LayerCurvature
from torch_thor.curvature.blocks import Blocks, Cut
from torch_thor.curvature.inverse import inverse_of
from torch_thor.distributed.ownership import packed_size
from torch_thor.distributed.processes import pack, unpack_
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.split.timing import device_name
from torch_thor.training.errors import UserError, first_line
from torch_thor.training.reports.plan_costs import Costs, make_costs
from torch_thor.training.reports.plan_sample import Sample
from torch_thor.training.reports.traffic import blocks_of

KINDS: dict[str, type[THOR] | type[ThorMuon]] = {"thor": THOR, "thor-muon": ThorMuon}
ROUNDS = 5
_ELEMENTS = 2**22  # of the blocks that are inverted at once in a measurement, at most
# Of a copy: 64 MB, more than the largest allocation that glibc takes from memory that it has already (32 MB)
_COPIED = 2**24

Clock = Callable[[], float]


def measure_costs(
    word: str,
    sample: Sample,
    device: torch.device,
    *,
    local_batch: int,
    split_dim: int,
    optimizer: str,
    rounds: int = ROUNDS,
) -> Costs:
    """Measure forward and backward pass, ordinary steps, refreshes, inversions, packing and copying.

    All of them take turns, in several rounds after one that does not count. The steps run with half of the local batch
    as well, which separates what grows with the number of samples from what does not.

    Args:
        word: The model, as the user gave it.
        sample: The model and its loss; the model is trained with a short step.
        device: The device.
        local_batch: The largest number of samples.
        split_dim: THOR's block size.
        optimizer: `thor` or `thor-muon`.
        rounds: Number of rounds that count.

    Returns:
        The costs.

    Raises:
        UserError: If the model cannot be run.
    """
    thor = KINDS[optimizer](sample.model, lr=1e-6, split_dim=split_dim, update_interval=2)
    for group in thor.param_groups:  # every refresh takes new factors
        group["trace_thresholds"] = (0.0, 0.0)
    counts = block_counts(thor.curvature.values())
    clock = clock_of(device)
    seconds: dict[str, list[float]] = {}
    inversions: dict[tuple[int, int], list[float]] = {}
    try:
        for turn in range(rounds + 1):
            if turn == 1:
                seconds, inversions = {}, {}
            for samples in dict.fromkeys((local_batch, max(1, local_batch // 2))):
                for name in ("refresh", "ordinary"):  # the first step refreshes, and then every second one
                    passed, stepped = _timed_step(sample, thor, samples, clock)
                    if name == "refresh":
                        seconds.setdefault(f"refresh {samples}", []).append(passed + stepped)
                    else:
                        seconds.setdefault(f"ordinary {samples}", []).append(passed)
                        seconds.setdefault(f"step {samples}", []).append(stepped)
            for shape in inversion_shapes(counts):
                inversions.setdefault(shape, []).append(_timed_inversion(shape, device, clock))
            for name, taken in zip(("pack", "unpack"), _timed_packing(split_dim, device, clock), strict=True):
                seconds.setdefault(name, []).append(taken)
            seconds.setdefault("copy", []).append(_timed_copy(device, clock))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{word} could not be measured: {first_line(error)}") from error
    return make_costs(
        seconds | {f"invert {count} of {size}": times for (size, count), times in inversions.items()},
        [(size, count, statistics.median(times)) for (size, count), times in inversions.items()],
        counts,
        model=word,
        split_dim=split_dim,
        optimizer=optimizer,
        sample=sample.description,
        local_batch=local_batch,
        machine={
            "device": device_name(device),
            "clock": "processor time" if clock is time.thread_time else "time that passes",
            "torch": torch.__version__,
            "torch_thor": __version__,
            "rounds": rounds,
            "seed": 0,
        },
    )


def block_counts(layers: Iterable[LayerCurvature]) -> Counter[int]:
    """Count the blocks of layers.

    Args:
        layers: The layers.

    Returns:
        Number of blocks by their size.
    """
    counts: Counter[int] = Counter()
    for one in blocks_of(layers):
        counts[one.shape[1]] += one.shape[0]
    return counts


def inversion_shapes(counts: Counter[int]) -> list[tuple[int, int]]:
    """Choose what to time: powers of two and the largest size, each with one block and with as many as are there.

    Args:
        counts: Number of blocks by their size.

    Returns:
        Sizes and numbers of blocks.
    """
    largest = max(counts)
    sizes = [*(2**i for i in range(largest.bit_length()) if 2**i < largest), largest]
    shapes = []
    for size in sizes:
        there = max((count for other, count in counts.items() if size / 2 < other <= size), default=16)
        shapes += [(size, 1), (size, max(2, min(there, _ELEMENTS // size**2)))]
    return shapes


def clock_of(device: torch.device) -> Clock:
    """Choose the clock.

    Args:
        device: The device that is measured.

    Returns:
        The processor time of this thread if the device is a CPU and torch has one thread, so that other programs hardly
        count; otherwise the time that passes, up to the end of all work that the device has been given.
    """
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def waiting() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return waiting


def _timed_step(sample: Sample, optimizer: CurvatureOptimizer, samples: int, clock: Clock) -> tuple[float, float]:
    started = clock()
    sample.loss(samples).backward()
    passed = clock()
    optimizer.step()
    stepped = clock()
    optimizer.zero_grad()
    return passed - started, stepped - passed


def _timed_inversion(shape: tuple[int, int], device: torch.device, clock: Clock) -> float:
    size, count = shape
    blocks = Blocks(Cut(((count, size),)), torch.full((count * size, size), 1 / size, device=device))
    blocks.parts[0].diagonal(dim1=-2, dim2=-1).add_(1.0)
    repeats = 1 if count > 1 else 5
    started = clock()
    for _ in range(repeats):
        inverse_of(blocks, 0.1)
    return (clock() - started) / repeats


def _timed_copy(device: torch.device, clock: Clock) -> float:
    source = torch.ones(_COPIED, device=device)
    started = clock()
    copy = source.clone()
    return (clock() - started) / copy.nbytes


def _timed_packing(size: int, device: torch.device, clock: Clock) -> tuple[float, float]:
    blocks = torch.ones(max(1, 2**20 // size**2), size, size, device=device)
    flat = torch.empty(len(blocks) * packed_size(size), device=device)
    started = clock()
    pack(blocks, flat)
    packed = clock()
    unpack_(blocks, flat)
    return (packed - started) / len(flat), (clock() - packed) / len(flat)
