"""The files that hold the results of jobs. Each is complete or absent, so an interruption loses no finished result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch_thor.training.output_files import write_whole

REMEDY = "make room for it; the same command then goes on with what is missing"


class Store(Protocol):
    """Holds the results of jobs by their keys."""

    @property
    def folder(self) -> Path:
        """The folder of its files, those of failures among them."""

    def holds(self, key: str) -> bool:
        """Tell whether a result is there.

        Args:
            key: Of a job.
        """

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Write a result; it is on the disk when this returns.

        Args:
            key: Of its job.
            result: Plain JSON values.
        """


class Folder:
    """A store of a file for each result, KEY.json.

    Args:
        folder: The folder of the files; made with the first result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, key: str) -> Path:
        """Name the file of a result.

        Args:
            key: Of its job.

        Returns:
            A path, whether the file is there or not.
        """
        return self.folder / f"{key}.json"

    def holds(self, key: str) -> bool:
        """Tell whether a result is there.

        Args:
            key: Of its job.

        Returns:
            True for a whole file: there are no others.
        """
        return self.file(key).exists()

    def read(self, key: str) -> dict[str, Any]:
        """Read a result.

        Args:
            key: Of its job.

        Returns:
            The plain values.
        """
        result: dict[str, Any] = json.loads(self.file(key).read_text(encoding="utf-8"))
        return result

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Write a result.

        Args:
            key: Of its job.
            result: Plain JSON values.
        """
        write_json(self.file(key), result)


class Rows:
    """A store of one file for all results: a JSON list with a line for each, which says which job it is of.

    Args:
        path: The file.
        name: Where a result has the plain values that make its key (see `key_of`).
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.folder, self.name = path, path.parent, name
        self.rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def find(self, key: str) -> dict[str, Any] | None:
        """Look a result up.

        Args:
            key: Of its job.

        Returns:
            The first one, or `None` if there is none.
        """
        return next((row for row in self.rows if key_of(row[self.name]) == key), None)

    def holds(self, key: str) -> bool:
        """Tell whether a result is there.

        Args:
            key: Of a job.

        Returns:
            True if it is.
        """
        return self.find(key) is not None

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Add a result, or put it in the place of the one that is there, and write the file.

        Args:
            key: Of its job.
            result: Plain JSON values.
        """
        assert key_of(result[self.name]) == key
        there = self.find(key)
        place = len(self.rows) if there is None else self.rows.index(there)
        self.rows[place : place + 1] = [dict(result)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "[\n" + ",\n".join(map(json.dumps, self.rows)) + "\n]\n", REMEDY)


def key_of(words: Mapping[str, Any]) -> str:
    """Name a job by what it is made of.

    Args:
        words: Plain values by name.

    Returns:
        `name value, ...`, in the order of the alphabet: the same words give the same key.
    """
    return ", ".join(f"{name} {words[name]}" for name in sorted(words))


def write_json(path: Path, values: Any, indent: int | None = None) -> None:
    """Write plain values as a whole file.

    Args:
        path: The file; its folder is made.
        values: Plain JSON values.
        indent: Spaces a level; `None` writes one line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=indent) + "\n", REMEDY)


def write_tables(folder: Path, text: str, values: Any = None) -> None:
    """Write the tables of raw data beside them: table.md, and table.json where there are values.

    Args:
        folder: Of the raw data.
        text: Markdown.
        values: The same numbers as plain JSON values; what is not finite becomes null, which every reader takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "table.md", text + "\n", REMEDY)
    if values is not None:
        write_json(folder / "table.json", finite(values), indent=1)


def finite(values: Any) -> Any:
    """Replace numbers that JSON does not know.

    Args:
        values: Plain values.

    Returns:
        The same with `None` for infinities and for what is no number.
    """
    return json.loads(json.dumps(values), parse_constant=lambda name: None)
