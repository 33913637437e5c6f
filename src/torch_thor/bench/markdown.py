"""Tables in Markdown, and the cells of them that hold several seeds."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table.

    Args:
        heads: One a column.
        rows: Cells, as many each.

    Returns:
        Markdown, without a line's end after the last row.

    Raises:
        ValueError: If a row has another number of cells: a table would hide those that are too many.
    """
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"{list(row)}: {len(row)} cells in a table of {len(heads)} columns: give one for each")
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, form: str) -> str:
    """Write what it took to reach something.

    Args:
        value: A number; `None` or infinite where it was not reached.
        form: Its format.

    Returns:
        The number, or `never`.
    """
    return "never" if value is None or math.isinf(value) else format(value, form)


def each(values: Iterable[float | None], form: str) -> str:
    """Write the values of several seeds.

    Args:
        values: One a seed.
        form: Format of each number.

    Returns:
        The numbers with commas between them.
    """
    return ", ".join(number(value, form) for value in values)


def middle(values: Sequence[float], form: str, *, of: Callable[[Sequence[float]], float] = statistics.median) -> str:
    """Write several seeds as their middle, and each.

    Args:
        values: One a seed; infinite where something was never reached.
        form: Format of each number.
        of: What the middle is.

    Returns:
        `middle (each)`.
    """
    return f"{number(of(values), form)} ({each(values, form)})"


def summary(values: Sequence[float], form: str) -> str:
    """Write several seeds with their spread.

    Args:
        values: One a seed.
        form: Format of each number.

    Returns:
        Mean ± standard deviation (of the sample, n - 1), and each value; of one seed the value alone.
    """
    if len(values) == 1:
        return format(values[0], form)
    spread = f"{format(statistics.fmean(values), form)} ± {format(statistics.stdev(values), form)}"
    return f"{spread} ({each(values, form)})"


def reached(values: Sequence[float | None], form: str) -> str:
    """Write what it took to reach something, of several seeds.

    Args:
        values: One a seed; `None` where it was not reached.
        form: Format of each number.

    Returns:
        As `summary`; where a seed never got there, each value alone.
    """
    known = [value for value in values if value is not None]
    return summary(known, form) if len(known) == len(values) else each(values, form)
