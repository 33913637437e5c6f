"""What all ranks agree on: that they are about to do the same, and their joint number of rows.

If they are not, all of them raise an error, before one waits for ever.
"""

import itertools
import zlib
from collections.abc import Sequence

from torch_thor.curvature.communication import Processes
from torch_thor.curvature.layer import LayerCurvature

HEADER = 4  # how many numbers agree() sends beside those that it is given
NUMBERS = 4  # how many it is given in a step

# The types of errors that other ranks raise too; for any other type they raise RuntimeError.
_ERRORS: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, FloatingPointError)


def agree(
    processes: Processes, error: Exception | None, facts: Sequence[str], numbers: Sequence[float]
) -> list[list[float]]:
    """Exchange whether all processes are ready for the same step, in one fixed-size collective."""
    facts_text = "\n".join(facts)
    text = (facts_text if error is None else str(error) or type(error).__name__).encode()
    kind = next((i for i, known in enumerate(_ERRORS) if isinstance(error, known)), 0)
    rows = processes.gather(
        [error is not None, kind, len(text), zlib.crc32(facts_text.encode()), *numbers]
    )
    failed = [i for i, row in enumerate(rows) if row[0]]
    differing = [i for i, row in enumerate(rows) if row[3] != rows[0][3]]
    if not failed and not differing:
        return [row[HEADER:] for row in rows]
    padded = text.ljust(max(int(row[2]) for row in rows), b"\0")
    texts = [bytes(map(int, row)).rstrip(b"\0").decode() for row in processes.gather(list(padded))]
    if error is not None:
        raise error
    if failed:
        raise _ERRORS[int(rows[failed[0]][1])](f"on rank {failed[0]}: {texts[failed[0]]}")
    rank = differing[0]
    lines = itertools.zip_longest(
        texts[0].splitlines(), texts[rank].splitlines(), fillvalue="nothing"
    )
    first, other = next((a, b) for a, b in lines if a != b)
    raise RuntimeError(
        f"the ranks are not about to do the same: rank 0 has {first!r}, rank {rank} has {other!r}. "
        "Make the optimizer with the same options on every rank, schedule it alike, and load the "
        "same checkpoint everywhere"
    )


def check_same_gradients(largest: Sequence[float]) -> None:
    """Raise an error if ranks that average their statistics do not average their gradients."""
    low, high = min(largest), max(largest)
    if high - low > 1e-3 * high:
        raise RuntimeError(
            f"the gradients differ between ranks: their largest norm is {high:.6g} on rank "
            f"{largest.index(high)} and {low:.6g} on rank {largest.index(low)}. Statistics are "
            "averaged over the process group, so the gradients must be averaged too: wrap the "
            "model in DistributedDataParallel (and step outside no_sync), name the data-parallel "
            "ranks with distributed=torch_thor.Distributed(process_group=...), or use "
            "torch_thor.Distributed(process_group=False) where every process trains a model of its "
            "own"
        )


def count_rows(
    processes: Processes,
    layers: Sequence[LayerCurvature],
    reached: set[LayerCurvature],
    inside_transform: set[str],
) -> None:
    """Replace row counts by those of all processes together.

    So A = Σ Σ a aᵀ / Σ R and G = Σ Σ g gᵀ / Σ R.
    """
    counts: list[float] = []
    for layer in layers:
        rows, group_rows = layer.statistics.rows, layer.statistics.group_rows
        counts += [rows, layer in reached, layer.name in inside_transform, *group_rows]
    totals = iter([sum(column) for column in zip(*processes.gather(counts), strict=True)])
    for layer in layers:
        statistics = layer.statistics
        statistics.rows = int(next(totals))
        if next(totals):
            reached.add(layer)
        if next(totals):
            inside_transform.add(layer.name)
        statistics.group_rows = [int(next(totals)) for _ in statistics.group_rows]
        if statistics.rows:
            statistics.sums()  # zeros on a process without rows, which takes part in the sum
