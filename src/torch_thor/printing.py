"""Printing plain text, such as the names of files, whose markup does nothing."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_thor.errors import visible


def cell(text: str) -> Text:
    """Make the plain text of a table's cell, heading or title."""
    return Text(visible(text))


def columns(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0
) -> Table:
    """Make a table of plain text; its columns are flush right except for the first `left`."""
    table = Table(title=title and cell(title), title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(cell(heading), justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line of plain text on a console, above any live display."""
    return lambda line: console.print(cell(line), soft_wrap=True)


def milliseconds(seconds: float) -> str:
    """Format the duration of a step, with one decimal below 100 ms."""
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"
