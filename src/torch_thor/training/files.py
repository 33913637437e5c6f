"""Files that are whole or not there, checksums that tell whether they still are, and folders that can be written to."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_thor.training.errors import MAKE_ROOM, require, writing

CHECKSUM = "checksum"  # the key that `sealed` adds


def sha256(path: Path) -> str:
    """The checksum of a file.

    Args:
        path: The file.

    Returns:
        SHA-256, in hexadecimal digits.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to a mapping that becomes JSON.

    Args:
        values: Plain JSON values, text for keys.

    Returns:
        The mapping with the key `checksum` at its end.
    """
    return {**values, CHECKSUM: digest(values)}


def intact(values: Mapping[str, Any]) -> bool:
    """Whether a mapping that was read from JSON is what `sealed` gave.

    Args:
        values: The mapping.

    Returns:
        False where the checksum is missing or wrong.
    """
    return values.get(CHECKSUM) == digest({key: value for key, value in values.items() if key != CHECKSUM})


def digest(values: Mapping[str, Any]) -> str:
    """The checksum of plain JSON values.

    Args:
        values: The values, text for keys.

    Returns:
        SHA-256 of their JSON with sorted keys.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Args:
        path: The file or folder.
    """
    with _descriptor(path) as descriptor:
        os.fsync(descriptor)


def write_whole(path: Path, text: str, remedy: str = MAKE_ROOM) -> None:
    """Write a text file under another name and rename it, so that it is whole or not there.

    Args:
        path: The file. A `UserError` names it where it cannot be written.
        text: Its contents.
        remedy: What to do then.
    """
    temporary = path.with_name(f"{path.name}.writing")
    with writing(path, remedy):
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.rename(path)


def check_place(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be made or written to, before any work is done for it; nothing is touched.

    Args:
        folder: The folder, there or not.
        option: What the user chose it with.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    below = "" if there == folder else f" (which {folder} is to lie below)"
    require(there.is_dir(), f"{option} {folder}: {there} is a file{below}: choose another folder with {option}")
    require(
        os.access(there, os.W_OK | os.X_OK),
        f"{option} {folder}: {there} cannot be written to{below}: choose another folder with {option}",
    )
