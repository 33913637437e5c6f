"""Files read as streams of bytes, uncompressed on the way by what their names say: .gz, .dz, .bz2, .xz."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

# What the decompressors raise for data that are cut short or damaged; gzip's BadGzipFile is an OSError.
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)

_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".dz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
SUFFIXES = tuple(_OPENERS)

_CHUNK = 1 << 20


class ByteStream:
    """The uncompressed bytes of a file, chunk by chunk, and how far the file has been read.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0  # uncompressed bytes so far
        self.read_of_file = 0  # bytes of the file itself

    def __iter__(self) -> Iterator[bytes]:
        """Read the file from its beginning.

        Yields:
            Its bytes, up to a megabyte each. Raises one of `DAMAGED` where compressed data are not whole.
        """
        opener = _OPENERS.get(self.path.suffix.lower())
        with self.path.open("rb") as raw:
            stream: IO[bytes] = raw if opener is None else opener(raw)
            while chunk := stream.read(_CHUNK):
                self.read += len(chunk)
                self.read_of_file = raw.tell()
                yield chunk


def base_suffix(path: Path) -> str:
    """The suffix of a file's name without that of its compression.

    Args:
        path: The file.

    Returns:
        Such as `.txt` for `book.txt.gz`, in lower case; empty where there is none.
    """
    name = path.with_suffix("") if path.suffix.lower() in _OPENERS else path
    return name.suffix.lower()
