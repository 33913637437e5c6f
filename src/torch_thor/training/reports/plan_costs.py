"""The costs of a model on one device, from which `torch-thor plan` predicts times."""

import json
import math
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_thor.training.errors import UserError, first_line
from torch_thor.training.output_files import write_whole


@dataclass(frozen=True)
class Line:
    """Seconds that grow with the number of samples.

    Args:
        fixed: Seconds of no samples.
        each: Seconds of one more.
    """

    fixed: float
    each: float

    def at(self, samples: int) -> float:
        """Return the seconds for so many samples.

        Args:
            samples: Their number.

        Returns:
            Seconds.
        """
        return self.fixed + self.each * samples


def line_through(few: tuple[int, float], many: tuple[int, float]) -> Line:
    """Return the line through two measurements; through the origin and the second if they would give a negative time.

    Args:
        few: A number of samples and its seconds.
        many: A larger number and its seconds.

    Returns:
        The line.
    """
    each = (many[1] - few[1]) / (many[0] - few[0]) if many[0] > few[0] else many[1] / many[0]
    fixed = many[1] - each * many[0]
    return Line(fixed, each) if fixed >= 0 and each >= 0 else Line(0.0, many[1] / many[0])


@dataclass(frozen=True)
class Inversion:
    """The measured inversion of blocks of one size.

    Args:
        size: Number of rows of a block.
        first: Seconds of the first block, with all that is started once.
        each: Seconds of one more.
    """

    size: int
    first: float
    each: float


@dataclass(frozen=True)
class Costs:
    """What one device takes for a model.

    Args:
        model: The model.
        split_dim: THOR's block size.
        optimizer: `thor` or `thor-muon`.
        sample: What a sample is.
        local_batch: The largest number of samples that was measured.
        forward_backward: Seconds of forward and backward pass on an ordinary step.
        step: Seconds of THOR's ordinary `step()`.
        refresh: Seconds that a refresh takes more than an ordinary step on one process, without the inversion:
            gathering the statistics, traces and the storing of results.
        inversion: The inversion of blocks, by increasing size.
        pack: Seconds to pack one element of a lower triangle.
        unpack: Seconds to unpack one.
        machine: Device, threads, clock and versions.
        seconds: All measured times, in rounds.
        copy: Seconds to copy a byte into new memory; 0 if it was not measured.
    """

    model: str
    split_dim: int
    optimizer: str
    sample: str
    local_batch: int
    forward_backward: Line
    step: float
    refresh: Line
    inversion: tuple[Inversion, ...]
    pack: float
    unpack: float
    machine: Mapping[str, Any]
    seconds: Mapping[str, Sequence[float]]
    copy: float = 0.0

    def inverting(self, counts: Mapping[int, int]) -> float:
        """Return the time to invert blocks, one batch for each size.

        Args:
            counts: Number of blocks by their size.

        Returns:
            Seconds; for sizes that were not measured, between those of the next smaller and the next larger one (on
            logarithmic scales).
        """
        total = 0.0
        for size, count in counts.items():
            if count:
                total += self._between(size, "first") + (count - 1) * self._between(size, "each")
        return total

    def _between(self, size: int, what: str) -> float:
        sizes = [one.size for one in self.inversion]
        place = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        high: float = getattr(self.inversion[place], what)
        if len(sizes) == 1:
            return high
        low: float = getattr(self.inversion[place - 1], what)
        share = math.log(size / sizes[place - 1]) / math.log(sizes[place] / sizes[place - 1])
        return low * (high / low) ** share if low > 0 and high > 0 else max(low, high)


def make_costs(
    seconds: Mapping[str, Sequence[float]],
    inversions: Iterable[tuple[int, int, float]],
    counts: Counter[int],
    **others: Any,
) -> Costs:
    """Derive costs from times.

    Args:
        seconds: Times in rounds by name: `ordinary N`, `step N`, `refresh N` for N samples, the last for a whole step
            with a refresh; `pack` and `unpack`, of one element; `copy`, of one byte.
        inversions: Size, number of blocks and seconds of inversions, at least one for each size.
        counts: Number of blocks of the model by size, all of which one process inverts.
        others: The other arguments of `Costs`.

    Returns:
        The costs, from medians over the rounds.
    """
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    numbers = sorted(int(name.split()[1]) for name in middle if name.startswith("ordinary "))
    few, many = numbers[0], numbers[-1]
    by_size: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for size, count, time in inversions:
        by_size[size].append((count, time))
    table = []
    for size, points in sorted(by_size.items()):
        (fewest, first), (most, last) = min(points), max(points)
        each = max(0.0, (last - first) / (most - fewest)) if most > fewest else first / fewest
        table.append(Inversion(size, max(first - (fewest - 1) * each, 0.0), each))
    costs = Costs(
        forward_backward=line_through((few, middle[f"ordinary {few}"]), (many, middle[f"ordinary {many}"])),
        step=statistics.median([middle[f"step {n}"] for n in numbers]),
        refresh=Line(0.0, 0.0),
        inversion=tuple(table),
        pack=middle["pack"],
        unpack=middle["unpack"],
        copy=middle["copy"],
        seconds=seconds,
        **others,
    )
    inverting = costs.inverting(counts)
    more = {
        n: max(0.0, middle[f"refresh {n}"] - middle[f"ordinary {n}"] - middle[f"step {n}"] - inverting) for n in numbers
    }
    return Costs(**{**vars(costs), "refresh": line_through((few, more[few]), (many, more[many]))})


def write_costs(costs: Costs, path: Path) -> None:
    """Write costs to a file.

    Args:
        costs: The costs.
        path: The file.

    Raises:
        UserError: If it cannot be written.
    """
    write_whole(path, json.dumps(asdict(costs), indent=1) + "\n", "choose another file with --save-costs")


def read_costs(path: Path) -> Costs:
    """Read costs that were written on some device.

    Args:
        path: The file.

    Returns:
        The costs.

    Raises:
        UserError: If the file cannot be read or has other contents.
    """
    remedy = "write it with --save-costs"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("forward_backward", "refresh"):
            found[name] = Line(**found[name])
        found["inversion"] = tuple(Inversion(**one) for one in found["inversion"])
        return Costs(**found)
    except OSError as error:
        raise UserError(f"--costs {path} cannot be read ({error.strerror or error}): {remedy}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"--costs {path} is no file of costs ({first_line(error)}): {remedy}") from error
