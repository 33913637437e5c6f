"""The number of each optimizer: it rises when the bits of its golden runs change (CONTRIBUTING).

A row carries the numbers of the optimizers that made it, and is stale once one of them has risen.
The numbers are kept beside the golden runs.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "tests" / "golden" / "numbers.json"


def present_numbers() -> dict[str, int]:
    """Return the present number of each optimizer."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))["numbers"])


def numbers_of(optimizers: Iterable[str]) -> dict[str, int]:
    """Return what a row carries that comes from these optimizers of ours."""
    present = present_numbers()
    return {name: present[name] for name in optimizers}


def is_stale(row: Mapping[str, Any]) -> bool:
    """Return whether an optimizer that made a row takes other steps by now."""
    return bool(row["numbers"] != numbers_of(row["numbers"]))
