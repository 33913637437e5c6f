"""The errors that end a command with one line: what the user can correct, and a signal's stop.

The message of a :class:`UserError` names the value, the rule and the remedy, in one line for each
fault. The command line prints it and exits with code 2. All other errors are Python's own.
"""


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
