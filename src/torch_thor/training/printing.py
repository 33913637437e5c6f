"""Printing untrusted text (file names, recipe values, error messages) without markup or terminal control sequences.

A file name may contain Rich markup or control sequences of the terminal. Every line and every table cell that can
contain such text is made by the functions of this module.
"""

from collections.abc import Callable

from rich.console import Console
from rich.text import Text


def visible(text: str) -> str:
    r"""Replace unprintable characters by Python's escape sequences, such as `\x1b`, `\n`, `\u202e`.

    Args:
        text: Any text, also a file name that is not valid UTF-8.

    Returns:
        One line of printable characters.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def printer(console: Console) -> Callable[[str], None]:
    """Make a function that prints one line of plain text on a console.

    Args:
        console: The console. If it has a live display, lines are printed above it.

    Returns:
        A function that takes the line.
    """

    def say(line: str) -> None:
        console.print(Text(visible(line)), soft_wrap=True)

    return say


def cell(text: str) -> Text:
    """Make the plain text of a table's cell, heading or title.

    Args:
        text: Any text.

    Returns:
        The text, with unprintable characters replaced.
    """
    return Text(visible(text))
