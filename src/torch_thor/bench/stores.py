"""Stores of the results of jobs. Files are replaced only by complete ones, so an interruption loses no result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch_thor.files import write_text, writing

REMEDY = "make room for it; the same command then goes on with what is missing"


class Store(Protocol):
    """Stores the results of jobs by their keys."""

    @property
    def folder(self) -> Path:
        """The folder of the files, including the tracebacks of failed jobs."""

    def holds(self, key: str) -> bool:
        """Return whether there is a result."""

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Write a result; it is on the disk when this returns."""


class Folder:
    """A store with one file per result, KEY.json.

    Args:
        folder: The folder of the files, which is created with the first result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, key: str) -> Path:
        """Return the path of the file of a result."""
        return self.folder / f"{key}.json"

    def holds(self, key: str) -> bool:
        """Return whether there is a result."""
        return self.file(key).exists()

    def read(self, key: str) -> dict[str, Any]:
        """Read a result."""
        result: dict[str, Any] = json.loads(self.file(key).read_text(encoding="utf-8"))
        return result

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Write a result."""
        write_json(self.file(key), result)


class Rows:
    """A store with one file for all results: a JSON list with one line per result.

    Args:
        path: The file.
        name: The name of the entry of a result that identifies its job, from which `key_of` makes the key.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.folder, self.name = path, path.parent, name
        self.rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def find(self, key: str) -> dict[str, Any] | None:
        """Look up a result."""
        return next((row for row in self.rows if key_of(row[self.name]) == key), None)

    def holds(self, key: str) -> bool:
        """Return whether there is a result."""
        return self.find(key) is not None

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Add a result, or replace the existing one of the job, and write the file."""
        assert key_of(result[self.name]) == key
        there = self.find(key)
        place = len(self.rows) if there is None else self.rows.index(there)
        self.rows[place : place + 1] = [dict(result)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "[\n" + ",\n".join(map(json.dumps, self.rows)) + "\n]\n")


def write_whole(path: Path, text: str, remedy: str = REMEDY) -> None:
    """Replace a text file by a complete new one; if that fails, a `UserError` names the remedy."""
    with writing(path, remedy):
        write_text(path, text)


def key_of(words: Mapping[str, Any]) -> str:
    """Return a key made of the values that identify a job."""
    return ", ".join(f"{name} {words[name]}" for name in sorted(words))


def write_json(path: Path, values: Any, indent: int | None = None) -> None:
    """Write JSON values into a file, which is replaced only when the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=indent) + "\n")


def write_tables(folder: Path, text: str, values: Any = None) -> None:
    """Write the tables of raw data into their folder: table.md, and table.json if values are given."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "table.md", text + "\n")
    if values is not None:
        write_json(folder / "table.json", finite(values), indent=1)


def finite(values: Any) -> Any:
    """Replace numbers that JSON cannot represent."""
    return json.loads(json.dumps(values), parse_constant=lambda name: None)
