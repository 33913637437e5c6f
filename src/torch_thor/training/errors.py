"""What the training application raises for its user, and nothing else.

A `UserError` is one line that names the value, the rule and the remedy: the command line prints it and exits
with code 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER_ERROR, INTERRUPTED = 2, 130  # exit codes
CTRL_C = "stopped by Ctrl-C; a run that has a checkpoint goes on with --resume"
MAKE_ROOM = "make room for it, then go on with --resume"


class UserError(ValueError):
    """Something that the person at the keyboard can put right."""


class DivergedError(UserError):
    """A loss or a gradient that is no longer finite."""


class ElsewhereError(UserError):
    """A `UserError` of another process, which says it to the user: here it only ends the work."""


class DamagedCheckpointError(UserError):
    """A checkpoint whose files are missing, cut short or altered."""


class StoppedError(Exception):
    """Training was stopped by a signal, after a checkpoint was written.

    Args:
        step: Optimizer steps done when it stopped.
        command: What resumes it.
    """

    def __init__(self, step: int, command: str | None = None) -> None:
        remedy = "" if command is None else f"; go on with: {command}"
        super().__init__(f"stopped at step {step}, checkpoint written{remedy}")
        self.step = step


def require(condition: bool, message: str) -> None:
    """Check one rule about a value that a user chose.

    Args:
        condition: Whether the rule holds.
        message: Value, rule and remedy, in one line.

    Raises:
        UserError: If the rule does not hold.
    """
    if not condition:
        raise UserError(message)


@contextmanager
def writing(path: Path, remedy: str = MAKE_ROOM) -> Iterator[None]:
    """Say in one line what could not be written, and why.

    Args:
        path: What the block writes.
        remedy: What to do about it.

    Yields:
        For the block.

    Raises:
        UserError: In the place of an `OSError`, such as that of a full disk.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from error
