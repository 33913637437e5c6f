"""Checksums of data sets, by which a run that continues knows that they are those it began with.

They stand for which samples there are. The content of image files is not read.
"""

import hashlib
import os
from collections.abc import Sequence

from torch import Tensor


def names_checksum(paths: Sequence[bytes]) -> str:
    """Return the SHA-256 of the sorted names of two or more files, relative to their folder."""
    # The first and the last file are of different classes, so they share no more than this folder.
    start = len(os.path.commonpath([paths[0], paths[-1]])) + 1
    return hashlib.sha256(b"\0".join(sorted(path[start:] for path in paths))).hexdigest()


def values_checksum(values: Tensor) -> str:
    """Return the SHA-256 of a tensor, such as the labels of a data set."""
    return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()
