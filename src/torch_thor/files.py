"""Writes files and folders under a temporary name, and renames them when they are complete.

They are flushed to the disk before they are renamed.

A process that is killed while it writes leaves a file of a name that begins with `REMAINS`; the
next process that writes the same file or folder replaces it.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_thor.training.errors import UserError, require

REMAINS = ".writing-"  # the prefix of the names of incomplete files and folders
MAKE_ROOM = "free some disk space, then continue with --resume"


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Replace a file when the block has written it completely.

    If the block raises an error, the old file stays.

    Args:
        path: The file; its folder must exist.
        shared: Whether several processes may write it at the same time. Each then uses a temporary
            name of its own, and the file is that of the process that finishes last.

    Yields:
        The path for the block to write, in the same folder and with the same suffix.
    """
    own = f"{secrets.token_hex(4)}-" if shared else ""
    temporary = path.with_name(f"{REMAINS}{own}{path.name}")
    try:
        yield temporary
        flush(temporary)
        temporary.rename(path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Replace a folder when the block has filled it completely.

    If the block raises an error, the old folder stays.

    Args:
        path: The folder; its parent folder must exist.

    Yields:
        The path of a new, empty folder for the block to fill with files.
    """
    temporary = path.with_name(f"{REMAINS}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # a process that was killed may have left it
    temporary.mkdir()
    try:
        yield temporary
        for file in (*temporary.iterdir(), temporary):
            flush(file)
        # a folder cannot be renamed to the name of one that has files
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        flush(path.parent)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Replace a text file by a complete new one in UTF-8; its folder must exist.

    `shared` is as for `whole_file`.
    """
    with whole_file(path, shared=shared) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file, or the list of the files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, remedy: str = MAKE_ROOM) -> Iterator[None]:
    """Convert an `OSError` of the block into a `UserError` with path, reason and remedy."""
    # Such an error is that of a full disk, for example.
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): {remedy}"
        ) from error


def check_place(folder: Path, option: str = "--out") -> None:
    """Refuse, before any work is done, a folder that cannot be created or written to.

    Nothing is changed.
    """
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    below = "" if existing == folder else f" (which {folder} would be in)"
    usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    why = "cannot be written to" if existing.is_dir() else "is a file"
    require(
        usable, f"{option} {folder}: {existing} {why}{below}: choose another folder with {option}"
    )
