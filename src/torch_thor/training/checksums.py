"""Checksums of files and of mappings that are written as JSON, to detect damage."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHECKSUM = "checksum"  # the key that `sealed` adds


def sha256(path: Path) -> str:
    """Compute the checksum of a file.

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
    """Tell whether a mapping that was read from JSON is what `sealed` returned.

    Args:
        values: The mapping.

    Returns:
        False where the checksum is missing or wrong.
    """
    return values.get(CHECKSUM) == digest({key: value for key, value in values.items() if key != CHECKSUM})


def digest(values: Mapping[str, Any]) -> str:
    """Compute the checksum of plain JSON values.

    Args:
        values: The values, text for keys.

    Returns:
        SHA-256 of their JSON with sorted keys.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
