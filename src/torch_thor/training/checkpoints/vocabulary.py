"""The tokenizer that a network of word pieces was trained with: a checkpoint records it, and no other one is accepted.

Two tokenizers of the same size give the same number to different word pieces. The weights of one then load for the
other without an error, but the network is useless.
"""

from pathlib import Path
from typing import Protocol, runtime_checkable

from torch_thor.training.checkpoints.checkpoint import Checkpoint
from torch_thor.training.errors import require


@runtime_checkable
class TokenizedTask(Protocol):
    """A task whose data were encoded by a tokenizer."""

    @property
    def tokenizer_file(self) -> Path:
        """The file of the tokenizer."""
        ...

    @property
    def tokenizer_checksum(self) -> str:
        """The SHA-256 checksum of the file."""
        ...


def tokenizer_of(task: object) -> str | None:
    """Return what a checkpoint records about the tokenizer of a task.

    Args:
        task: The task.

    Returns:
        The checksum of its tokenizer; `None` for a task without a tokenizer.
    """
    return task.tokenizer_checksum if isinstance(task, TokenizedTask) else None


def check_tokenizer(saved: Checkpoint, task: object) -> None:
    """Refuse data that were encoded by another tokenizer than the data that a network was trained on.

    Args:
        saved: A checkpoint of the network.
        task: The task, with the data that its recipe names now.

    Raises:
        UserError: If the tokenizers differ.
    """
    if saved.tokenizer is not None and isinstance(task, TokenizedTask):
        require(
            task.tokenizer_checksum == saved.tokenizer,
            f"{task.tokenizer_file} is not the tokenizer that {saved.path} was trained with (SHA-256 "
            f"{task.tokenizer_checksum[:12]}, not {saved.tokenizer[:12]}): the corpus was prepared again or is another "
            f"one; use the corpus of the training, or prepare one with --tokenizer and its tokenizer.json",
        )
