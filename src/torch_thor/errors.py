"""Errors that end a command with one line, and that line: a user's mistake, and a signal's stop.

The message of a :class:`UserError` names the value, the rule and the remedy, in one line for each
fault. The command line prints it and exits with code 2. All other errors are Python's own.
"""

import os
import sys


class UserError(ValueError):
    """An error that the user can correct."""


class DivergedError(UserError):
    """The loss or a gradient of a training is no longer finite."""


class StoppedError(Exception):
    """A signal has stopped a training after a step, and a checkpoint of it was written."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"stopped at step {step}, checkpoint written; to continue, give the same command with "
            "--resume"
        )


def require(condition: bool, message: str) -> None:
    """Raise a `UserError` with a message (value, rule and remedy) unless a rule holds."""
    if not condition:
        raise UserError(message)


def first_line(error: BaseException) -> str:
    """Return the first line of an error without a final colon, or its type if it has no message."""
    lines = (line.strip().removesuffix(":") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def visible(text: str) -> str:
    r"""Replace unprintable characters by Python's escapes, such as `\x1b` or `\n`."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


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
