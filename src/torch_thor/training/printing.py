"""Printing text from outside (file names, recipe values, error messages) so that it has no effect on the terminal.

A file name may hold what Rich takes for markup and what a terminal takes for a command. Every line and every cell that
can hold such text goes through here.
"""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text


def visible(text: str) -> str:
    r"""Write what cannot be printed as Python writes it in a string: `\x1b`, `\n`, `\u202e`.

    Args:
        text: Any text, also with bytes of a file name that are no UTF-8.

    Returns:
        One line of printable characters.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def printer(console: Console) -> Callable[[str], None]:
    """Make a function that prints one line of plain text on a console.

    Args:
        console: Where it goes; above the bars where it has a live display.

    Returns:
        A function of the line.
    """

    def say(line: str) -> None:
        console.print(Text(visible(line)), soft_wrap=True)

    return say


def cell(text: str) -> Text:
    """Make a cell, heading or title of a table.

    Args:
        text: Any text.

    Returns:
        The same as plain text.
    """
    return Text(visible(text))
