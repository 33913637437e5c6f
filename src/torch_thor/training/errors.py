"""The errors of a training."""

from torch_thor.errors import UserError

USER_ERROR, INTERRUPTED = 2, 130  # exit codes
CTRL_C = "stopped by Ctrl-C; a run that has a checkpoint can be continued with --resume"


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
