"""Writing the files of a run, with a one-line error if a file cannot be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_thor.files import write_text
from torch_thor.training.errors import UserError, require

MAKE_ROOM = "free some disk space, then continue with --resume"


@contextmanager
def writing(path: Path, remedy: str = MAKE_ROOM) -> Iterator[None]:
    """Convert an `OSError` of the block into a one-line `UserError` that names the path and the reason.

    Args:
        path: The file or folder that the block writes.
        remedy: What the user can do, for the error message.

    Yields:
        Nothing.

    Raises:
        UserError: Instead of an `OSError`, such as that of a full disk.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from error


def write_whole(path: Path, text: str, remedy: str = MAKE_ROOM) -> None:
    """Replace a text file atomically: it is written under another name, then renamed.

    Args:
        path: The file.
        text: The new content.
        remedy: What the user can do if the file cannot be written, for the error message.

    Raises:
        UserError: If the file cannot be written.
    """
    with writing(path, remedy):
        write_text(path, text)


def check_place(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be created or written to, before any work is done. Nothing is changed.

    Args:
        folder: The folder; it need not exist.
        option: The option that the user chose it with, for the error message.

    Raises:
        UserError: If the folder cannot be created or written to.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    below = "" if existing == folder else f" (which {folder} would be in)"
    require(existing.is_dir(), f"{option} {folder}: {existing} is a file{below}: choose another folder with {option}")
    require(
        os.access(existing, os.W_OK | os.X_OK),
        f"{option} {folder}: {existing} cannot be written to{below}: choose another folder with {option}",
    )
