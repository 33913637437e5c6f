"""Printing text of others, such as file names and recipe values.

Their markup and control sequences do nothing.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def visible(text: str) -> str:
    r"""Replace unprintable characters by Python's escapes, such as `\x1b`, `\n`, `\u202e`."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def cell(text: str) -> "Text":
    """Make the plain text of a table's cell, heading or title."""
    from rich.text import Text  # may not be installed, which is told by `print_message`

    return Text(visible(text))


def printer(console: "Console") -> Callable[[str], None]:
    """Make a function that prints one line of plain text on a console, above any live display."""
    return lambda line: console.print(cell(line), soft_wrap=True)


def milliseconds(seconds: float) -> str:
    """Format the duration of a step, with one decimal below 100 ms."""
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"


def is_first_rank() -> bool:
    """Return whether this is the only process, or the first of those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def print_message(text: str) -> None:
    """Print lines on stderr, with the rank of the process if it is not the first."""
    rank = "" if is_first_rank() else f", rank {os.environ['RANK']}"
    for line in text.splitlines():
        sys.stderr.write(f"torch-thor{rank}: {visible(line)}\n")
