"""The errors that the training application raises for its user.

A `UserError` is one line that names the value, the rule and the remedy: the command line prints it and exits
with code 2.
"""

USER_ERROR, INTERRUPTED = 2, 130  # exit codes
CTRL_C = "stopped by Ctrl-C; a run that has a checkpoint goes on with --resume"


class UserError(ValueError):
    """An error that the user can correct."""


class DivergedError(UserError):
    """A loss or a gradient that is no longer finite."""


class ElsewhereError(UserError):
    """A `UserError` of another process, which reports it to the user; in this process it only ends the work."""


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


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, to quote in a message of one line.

    Args:
        error: The exception.

    Returns:
        Its first line that is not blank, without a colon at its end; the exception's type where there is none.
    """
    lines = (line.strip().removesuffix(":") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
