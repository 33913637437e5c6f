"""Printing text of others, such as file names and recipe values.

Their markup and control sequences do nothing.
"""

import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
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


def columns(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0
) -> "Table":
    """Make a table of plain text, whose columns are flush right but for the first `left` ones."""
    from rich.table import Table

    table = Table(title=title and cell(title), title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(cell(heading), justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def printer(console: "Console") -> Callable[[str], None]:
    """Make a function that prints one line of plain text on a console, above any live display."""
    return lambda line: console.print(cell(line), soft_wrap=True)


def milliseconds(seconds: float) -> str:
    """Format the duration of a step, with one decimal below 100 ms."""
    return f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f} ms"


def quantity(number: int) -> str:
    """Format a number in thousands, millions or billions, such as `124.4 M`."""
    for letter, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f} {letter}"
    return str(number)


def is_first_rank() -> bool:
    """Return whether this is the only process, or the first of those that `torchrun` started."""
    # schedulers and containers may set RANK where nothing else does what torchrun does
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def print_message(text: str) -> None:
    """Print lines on stderr, with the rank of the process if its environment has another than 0."""
    rank = os.environ.get("RANK", "0")
    of_rank = "" if rank in ("", "0") else f", rank {rank}"
    for line in text.splitlines():
        sys.stderr.write(f"torch-thor{of_rank}: {visible(line)}\n")


class _Lasting:
    """An output stream whose failure ends nothing: what comes after it is dropped."""

    def __init__(self, name: str, stream: Any) -> None:
        self._name, self._stream = name, stream

    def write(self, text: str) -> int:
        """Write a text if the stream still takes one."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is kept if the stream still takes it."""
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except UnicodeError:  # a fault of the text, and not of the stream
            raise
        except (OSError, ValueError) as error:  # ValueError: it was closed
            # What is kept in the stream goes nowhere too, also when Python ends.
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            # It stays open for as long as the process lives.
            self._stream = pathlib.Path(os.devnull).open("w")  # noqa: SIM115
            if self._name == "stdout":
                reason = getattr(error, "strerror", None) or error
                print_message(f"nothing more can be printed ({reason}): the run goes on without it")


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let no failure of stdout or stderr end the block: a reader that left, a full disk."""
    before = sys.stdout, sys.stderr
    sys.stderr, sys.stdout = _Lasting("stderr", before[1]), _Lasting("stdout", before[0])
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before
