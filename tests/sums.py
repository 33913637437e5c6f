"""Checksums of files and manifests, computed again for those that a test has changed."""

import hashlib
import json


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def add_checksum(values):
    """The manifest `values` with its own checksum."""
    return {
        **values,
        "checksum": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(),
    }
