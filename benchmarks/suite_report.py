"""Tables and pictures of suite.py."""

from typing import Any


def table(rows: dict[str, Any]) -> str:
    """Return the tables."""
    return f"{len(rows)} rows"


def draw(rows: dict[str, Any]) -> None:
    """Draw the pictures."""
