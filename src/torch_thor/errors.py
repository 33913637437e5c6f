"""The errors that the training application raises for its user.

The message of a `UserError` names the value, the rule and the remedy, in one line for each fault.
The command line prints it and exits with code 2.
"""

USER_ERROR, INTERRUPTED = 2, 130  # exit codes
CTRL_C = "stopped by Ctrl-C; a run that has a checkpoint can be continued with --resume"


class UserError(ValueError):
    """An error that the user can correct."""


class DivergedError(UserError):
    """The loss or a gradient is no longer finite."""


class UnreadableError(UserError):
    """More samples than `data.max_broken` allows cannot be read."""


class ElsewhereError(UserError):
    """A `UserError` of another process, which reports it to the user; here it only ends work."""


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing, truncated or altered."""


class StoppedError(Exception):
    """A signal stopped the training, after a checkpoint was written.

    Args:
        step: Optimizer steps done when the training stopped.
        command: The command that resumes it, for the message.
    """

    def __init__(self, step: int, command: str | None = None) -> None:
        remedy = "" if command is None else f"; continue with: {command}"
        super().__init__(f"stopped at step {step}, checkpoint written{remedy}")
        self.step = step


def require(condition: bool, message: str) -> None:
    """Raise a `UserError` with a message (value, rule and remedy) unless a rule holds."""
    if not condition:
        raise UserError(message)


def first_line(error: BaseException) -> str:
    """Return the first line of an error without a final colon, or its type if it has no message."""
    lines = (line.strip().removesuffix(":") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
