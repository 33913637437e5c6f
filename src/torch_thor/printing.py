"""Printing plain text, such as the names of files, whose markup does nothing."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Rich is part of the extra `train`; the functions that need it import it
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def visible(text: str) -> str:
    r"""Replace unprintable characters by Python's escapes, such as `\x1b` or `\n`."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def cell(text: str) -> "Text":
    """Make the plain text of a table's cell, heading or title."""
    from rich.text import Text

    return Text(visible(text))


def columns(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0
) -> "Table":
    """Make a table of plain text; its columns are flush right except for the first `left`."""
    from rich.table import Table

    table = Table(title=title and cell(title), title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(cell(heading), justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def printer(console: "Console") -> Callable[[str], None]:
    """Return a function that prints a line of plain text on a console, above any live display."""
    return lambda line: console.print(cell(line), soft_wrap=True)


def milliseconds(seconds: float) -> str:
    """Format the duration of a step, with one decimal below 100 ms."""
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"


def is_first_rank() -> bool:
    """Return whether this is the only process, or the first of those that `torchrun` started."""
    # schedulers and containers set RANK for processes that do not train together
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def print_message(text: str) -> None:
    """Print lines on stderr, with the rank of the process unless it is 0."""
    rank = os.environ.get("RANK", "0")
    of_rank = "" if rank in ("", "0") else f", rank {rank}"
    for line in text.splitlines():
        print(f"torch-thor{of_rank}: {visible(line)}", file=sys.stderr)
