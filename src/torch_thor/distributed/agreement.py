"""What all ranks agree on: that they are about to do the same, and their joint number of rows.

If they are not, all of them raise an error, before a process waits for ever.
"""

import itertools
import zlib
from collections.abc import Sequence

from torch_thor.curvature.communication import Processes
from torch_thor.curvature.layer import LayerCurvature

HEADER = 3  # how many numbers agree() sends beside those that it is given
NUMBERS = 1  # how many it is given in a step: N


def agree(
    processes: Processes, error: Exception | None, facts: Sequence[str], numbers: Sequence[float]
) -> list[list[float]]:
    """Exchange whether all processes are ready for the same step, in one fixed-size collective."""
    facts_text = "\n".join(facts)
    text = (facts_text if error is None else str(error) or type(error).__name__).encode()
    checksum = zlib.crc32(facts_text.encode())
    rows = processes.gather([error is not None, len(text), checksum, *numbers])
    failed = [i for i, row in enumerate(rows) if row[0]]
    differing = [i for i, row in enumerate(rows) if row[2] != rows[0][2]]
    if not failed and not differing:
        return [row[HEADER:] for row in rows]
    padded = text.ljust(max(int(row[1]) for row in rows), b"\0")
    texts = [bytes(map(int, row)).rstrip(b"\0").decode() for row in processes.gather(list(padded))]
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"on rank {failed[0]}: {texts[failed[0]]}")
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


def count_rows(
    processes: Processes, layers: Sequence[LayerCurvature], reached: set[LayerCurvature]
) -> None:
    """Replace row counts by those of all processes together.

    So A = Σ Σ a aᵀ / Σ R and G = Σ Σ g gᵀ / Σ R.
    """
    counts: list[float] = []
    for layer in layers:
        counts += [layer.statistics.rows, layer in reached, *layer.statistics.group_rows]
    totals = iter([sum(column) for column in zip(*processes.gather(counts), strict=True)])
    for layer in layers:
        statistics = layer.statistics
        statistics.rows = int(next(totals))
        if next(totals):
            reached.add(layer)
        statistics.group_rows = [int(next(totals)) for _ in statistics.group_rows]
        if statistics.rows:
            statistics.sums()  # zeros on a process without rows, which takes part in the sum
