"""Files and folders that are either complete or absent: written under another name, flushed to the disk, and renamed.

A process that is killed while it writes leaves the other name behind, which begins with `REMAINS`; the next one that
writes the same file or folder replaces it.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMAINS = ".writing-"  # what the names of incomplete files and folders begin with


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Replace a file as a whole; where the block raises, what was there before stays as it was.

    Args:
        path: The file; its folder must exist.
        shared: Whether several processes may write it at the same time. Each then writes under a name of its own, and
            the last one to finish wins.

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
    """Replace a folder as a whole; where the block raises an error, what was there before stays as it was.

    Args:
        path: The folder; the one that it lies in must exist.

    Yields:
        The path of a new, empty folder for the block to fill with files.
    """
    temporary = path.with_name(f"{REMAINS}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed here
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        shutil.rmtree(path, ignore_errors=True)  # a folder is not renamed onto another one
        temporary.rename(path)
        flush(path.parent)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_remains(folder: Path, name: str = "*") -> None:
    """Remove the incomplete files and folders of processes that were killed while they wrote.

    Args:
        folder: Where they may lie. No other process may be writing there what matches `name`.
        name: A glob pattern of the names that they were to have.
    """
    for remains in folder.glob(f"{REMAINS}{name}"):
        if remains.is_dir():
            shutil.rmtree(remains, ignore_errors=True)
        else:
            remains.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Replace a text file as a whole.

    Args:
        path: The file; its folder must exist.
        text: Its contents, written in UTF-8.
        shared: As for `whole_file`.
    """
    with whole_file(path, shared=shared) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk.

    Args:
        path: The file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
