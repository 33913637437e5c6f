"""Writes files and folders under a temporary name, flushes them to the disk and renames them when they are complete.

A process that is killed while it writes leaves a file of a name that begins with `REMAINS`; the next process that
writes the same file or folder replaces it.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMAINS = ".writing-"  # the prefix of the names of incomplete files and folders


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Replace a file when the block has written it completely; if the block raises an error, the old file stays.

    Args:
        path: The file; its folder must exist.
        shared: Whether several processes may write it at the same time. Each then uses a temporary name of its own,
            and the file is that of the process that finishes last.

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
    """Replace a folder when the block has filled it completely; if the block raises an error, the old folder stays.

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
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        shutil.rmtree(path, ignore_errors=True)  # a folder cannot be renamed to the name of one that has files
        temporary.rename(path)
        flush(path.parent)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_remains(folder: Path, name: str = "*") -> None:
    """Remove the incomplete files and folders of processes that were killed while they wrote.

    Args:
        folder: The folder to search. No process may be writing files there whose names match `name`.
        name: A glob pattern for the final names of the files and folders.
    """
    for remains in folder.glob(f"{REMAINS}{name}"):
        if remains.is_dir():
            shutil.rmtree(remains, ignore_errors=True)
        else:
            remains.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Replace a text file by a complete new one.

    Args:
        path: The file; its folder must exist.
        text: The contents, which are written in UTF-8.
        shared: As for `whole_file`.
    """
    with whole_file(path, shared=shared) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file, or the list of the files of a folder, is on the disk.

    Args:
        path: The file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
