"""Checksums that detect damage: of files, and of mappings that are written as JSON."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHECKSUM = "checksum"  # the key that `add_checksum` adds


def sha256(path: Path) -> str:
    """Compute the checksum of a file.

    Args:
        path: The file.

    Returns:
        SHA-256, in hexadecimal digits.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to a mapping that is to be written as JSON.

    Args:
        values: JSON values with strings as keys.

    Returns:
        A new mapping, with the key `checksum` at its end.
    """
    return {**values, CHECKSUM: digest(values)}


def checksum_matches(values: Mapping[str, Any]) -> bool:
    """Verify the checksum of a mapping that was read from JSON.

    Args:
        values: The mapping, as `add_checksum` returned it.

    Returns:
        False if the checksum is missing or wrong.
    """
    return values.get(CHECKSUM) == digest({key: value for key, value in values.items() if key != CHECKSUM})


def digest(values: Mapping[str, Any]) -> str:
    """Compute the checksum of JSON values.

    Args:
        values: JSON values with strings as keys.

    Returns:
        SHA-256 of their JSON with sorted keys, in hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
