"""Files and folders that are complete or absent.

They are written under a temporary name, flushed to the disk, and renamed. A process that is killed
while it writes leaves a name that begins with `REMAINS`, which the next write replaces.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMAINS = ".writing-"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path to write; replace the file by it at the end, and not after an error."""
    temporary = path.with_name(f"{REMAINS}{path.name}")
    try:
        yield temporary
        flush(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill; replace the folder by it at the end, and not after an error."""
    temporary = path.with_name(f"{REMAINS}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in (*temporary.iterdir(), temporary):
            flush(file)
        # a folder cannot be renamed to the name of a folder with files
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file completely, in UTF-8."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or the list of the files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
