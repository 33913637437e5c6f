"""Checksums of files, computed again for those that a test has changed."""

import hashlib


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
