"""Files of results, replaced only by complete files, so an interruption loses no result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_thor.files import write_text


class Lines:
    """A store with a line of JSON for each result.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {
            key_of(row["job"]): row for row in map(json.loads, lines)
        }

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Add a result, or replace the existing one of the job, and write the file."""
        self.rows[key] = dict(result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows.values()))


def key_of(words: Mapping[str, Any]) -> str:
    """Return a key made of the values that identify a job, whatever their order."""
    return ", ".join(f"{name} {_in_order(words[name])}" for name in sorted(words))


def _in_order(value: Any) -> Any:
    """Return a value, the options of a recipe in the order of the alphabet."""
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value
