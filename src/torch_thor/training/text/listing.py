"""Listing the files below a folder. Symbolic links are followed, and each file is listed once."""

import os
from collections.abc import Callable
from os.path import realpath  # Path.resolve() raises an exception for a link to itself
from pathlib import Path

from torch_thor.training.errors import UserError, require


def files_below(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """List the files below a folder.

    Links to folders and files are followed. If a folder or file is reached in several ways, also if a link points to a
    folder that contains it, it is listed only once: by a path without links if there is one.

    Args:
        folder: The folder.
        wanted: Whether a file of this name is listed.

    Returns:
        The regular files in the order of their paths, and links to files that do not exist.

    Raises:
        UserError: If a folder cannot be listed, a wanted file is a pipe, socket or device, or a link points to a folder
            that contains `folder`.
    """
    found: dict[str, Path] = {}  # the path of each file, by the path without links
    visited: set[str] = set()
    top, linked_files = realpath(folder), []
    pending = [folder]
    while pending:
        linked_folders = []
        for begin in pending:
            for here, folders, names in os.walk(begin, onerror=_refuse):
                place, real = Path(here), realpath(here)
                if real in visited:
                    folders.clear()
                    continue
                visited.add(real)
                require(
                    not Path(top).is_relative_to(real) or real == top,
                    f"{here} is a link to {real}, which contains {folder}: remove the link, or name other folders",
                )
                linked_folders += [place / name for name in folders if (place / name).is_symlink()]
                for path in (place / name for name in names if wanted(place / name)):
                    if path.is_symlink():
                        linked_files.append(path)
                    else:
                        found[realpath(path)] = _no_pipe(path)
        pending = sorted(linked_folders)
    for path in sorted(linked_files):
        found.setdefault(realpath(path), _no_pipe(path))
    return sorted(found.values())


def _no_pipe(path: Path) -> Path:
    regular = path.is_file() or not path.exists()  # what does not exist is named when it is read
    # Opening a pipe would wait for ever.
    require(regular, f"{path} is not a regular file (a pipe, socket or device): move it out of the folder")
    return path


def _refuse(error: OSError) -> None:
    raise UserError(
        f"{error.filename} cannot be listed ({error.strerror}): make it readable, or name other folders"
    ) from error
