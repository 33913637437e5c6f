"""Writing the files of a run, with an error of one line where they cannot be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_thor.files import write_text
from torch_thor.training.errors import UserError, require

MAKE_ROOM = "make room for it, then go on with --resume"


@contextmanager
def writing(path: Path, remedy: str = MAKE_ROOM) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` of one line that says what could not be written, and why.

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


def write_whole(path: Path, text: str, remedy: str = MAKE_ROOM) -> None:
    """Replace a text file as a whole.

    Args:
        path: The file. A `UserError` names it where it cannot be written.
        text: Its contents.
        remedy: What to do then.
    """
    with writing(path, remedy):
        write_text(path, text)


def check_place(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be made or written to, before any work is done for it; nothing is touched.

    Args:
        folder: The folder, there or not.
        option: What the user chose it with.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    below = "" if there == folder else f" (which {folder} would be in)"
    require(there.is_dir(), f"{option} {folder}: {there} is a file{below}: choose another folder with {option}")
    require(
        os.access(there, os.W_OK | os.X_OK),
        f"{option} {folder}: {there} cannot be written to{below}: choose another folder with {option}",
    )
