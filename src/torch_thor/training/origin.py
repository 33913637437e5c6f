"""What a run was begun from: a recipe of the package or a file, as it was read, without words.

It is kept in the run folder. So an edit of the file since then is noticed, and the run of another
file of the same name is not continued.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_thor.files import write_text
from torch_thor.training.recipes import is_file_name, read_keys

ORIGIN = ".origin"  # the name of the file in the run folder


@dataclass(frozen=True)
class Origin:
    """A recipe as it was read.

    Args:
        name: Its name, or the absolute path of its file.
        places: Where it may be: this name, and the same place relative to the run folder, in case
            both were moved together.
        keys: Its keys, as they are written.
    """

    name: str
    places: frozenset[str]
    keys: Mapping[str, Any]

    def is_same(self, other: "Origin") -> bool:
        """Whether both are one file, or one recipe of the package."""
        return bool(self.places & other.places)


def read_origin(name: str) -> Origin:
    """Read the recipe that a user names; it is not checked yet."""
    place = str(Path(name).resolve()) if is_file_name(name) else name
    return Origin(place, frozenset([place]), read_keys(name))


def stored_origin(folder: Path) -> Origin | None:
    """Return what the run in a folder was begun from; None for one of a program's own recipe."""
    try:
        content = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
        name, beside, keys = content["name"], content["beside"], dict(content["keys"])
        moved = name if beside is None else os.path.normpath(folder.resolve() / beside)
        return Origin(name, frozenset([name, moved]), keys)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_origin(origin: Origin, folder: Path) -> None:
    """Write what the run in a folder was begun from."""
    beside = os.path.relpath(origin.name, folder.resolve()) if is_file_name(origin.name) else None
    content = {"name": origin.name, "beside": beside, "keys": origin.keys}
    write_text(folder / ORIGIN, json.dumps(content, indent=2, default=str) + "\n")
