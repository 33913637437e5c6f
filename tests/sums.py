"""The checksums that files and manifests carry, worked out anew for those that a test has changed."""

import hashlib
import json


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sealed(values):
    """A manifest with the checksum of its own values."""
    return {**values, "checksum": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}
