"""What all ranks tell each other before a step: that they are about to do the same, and how many rows each has.

If they are not, all of them raise an error, before one waits for ever.
"""

import zlib
from collections.abc import Sequence

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes

HEADER = 4  # how many numbers agree() sends beside those that it is given
NUMBERS = 4  # how many it is given in a step

# The types of errors that other ranks raise too; for any other type they raise RuntimeError.
_ERRORS: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, FloatingPointError)


def agree(
    processes: Processes, error: Exception | None, facts: Sequence[str], numbers: Sequence[float]
) -> list[list[float]]:
    """Exchange whether every process is ready for the same step, in one collective of a fixed size."""
    text = "" if error is None else str(error) or type(error).__name__
    kind = next((i for i, known in enumerate(_ERRORS) if type(error) is known), 0)
    facts_text = "\n".join(facts)
    size = len((text or facts_text).encode())
    header = [error is not None, kind, size, zlib.crc32(facts_text.encode())]
    rows = processes.gather([*header, *numbers])
    failed = [i for i, row in enumerate(rows) if row[0]]
    differing = [i for i, row in enumerate(rows) if row[3] != rows[0][3]]
    if failed or differing:
        texts = _gather_texts(processes, text or facts_text, max(int(row[2]) for row in rows))
        if error is not None:
            raise error
        if failed:
            raise _ERRORS[int(rows[failed[0]][1])](f"on rank {failed[0]}: {texts[failed[0]]}")
        raise RuntimeError(_difference(texts[0], differing[0], texts[differing[0]]))
    return [row[len(header) :] for row in rows]


def check_same_gradients(largest: Sequence[float]) -> None:
    """Raise an error if ranks that average their statistics do not average their gradients."""
    low, high = min(largest), max(largest)
    if high - low > 1e-3 * high:
        raise RuntimeError(
            f"the gradients differ between ranks: their largest norm is {high:.6g} on rank {largest.index(high)} and "
            f"{low:.6g} on rank {largest.index(low)}. THOR averages its statistics over the process group, so the "
            f"gradients must be averaged too: wrap the model in DistributedDataParallel (and step outside no_sync), "
            f"give the data-parallel group as process_group=, or process_group=False where every process trains a "
            f"model of its own"
        )


def _gather_texts(processes: Processes, text: str, size: int) -> list[str]:
    padded = text.encode().ljust(size, b"\0")
    return [bytes(int(b) for b in row).rstrip(b"\0").decode() for row in processes.gather(list(padded))]


def _difference(first_text: str, rank: int, other_text: str) -> str:
    left, right = first_text.splitlines(), other_text.splitlines()
    lines = zip([*left, *["nothing"] * len(right)], [*right, *["nothing"] * len(left)], strict=False)
    first, other = next((a, b) for a, b in lines if a != b)
    return (
        f"the ranks are not about to do the same: rank 0 has {first!r}, rank {rank} has {other!r}. Make the optimizer "
        f"with the same options on every rank, schedule it alike, and load the same checkpoint everywhere"
    )


def count_rows(
    processes: Processes, layers: Sequence[LayerCurvature], reached: set[LayerCurvature], inside_transform: set[str]
) -> None:
    """Replace the row counts of this process by those of all together: A = Σ Σ a aᵀ / Σ R, and G likewise."""
    counts: list[float] = []
    for layer in layers:
        own = layer.statistics
        counts += [own.rows, layer in reached, layer.name in inside_transform, *own.group_rows]
    totals = iter([int(sum(column)) for column in zip(*processes.gather(counts), strict=True)])
    for layer in layers:
        own = layer.statistics
        own.rows = next(totals)
        if next(totals):
            reached.add(layer)
        if next(totals):
            inside_transform.add(layer.name)
        own.group_rows = [next(totals) for _ in own.group_rows]
        if own.rows:
            own.sums()  # zeros on a process without rows, which takes part in the sum
