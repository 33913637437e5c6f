"""Formats tables in Markdown, and cells that contain the results of several seeds."""

import math
import statistics
from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table."""
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(
                f"{list(row)}: {len(row)} cells in a table of {len(heads)} columns: give one for "
                "each"
            )
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, form: str) -> str:
    """Format a number, such as the steps to a target."""
    return "never" if value is None or math.isinf(value) else format(value, form)


def with_error(values: Sequence[float]) -> str:
    """Format the mean of several seeds and its standard error, to two digits of the error."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / len(values) ** 0.5
    digits = max(0, 1 - _exponent(error)) if error else 4
    if 0 < mean < 1e-3:
        power = math.floor(math.log10(mean))
        digits += power
        return f"({mean / 10**power:.{digits}f} ± {error / 10**power:.{digits}f})e{power}"
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def _exponent(value: float) -> int:
    """Return the power of ten of a number that is rounded to two digits."""
    return int(f"{value:.1e}".partition("e")[2])
