"""Files read as streams of bytes, uncompressed on the way by what their names say: .gz, .dz, .bz2, .xz."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

# What the decompressors raise for data that are cut short or damaged; gzip's BadGzipFile is an OSError.
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)

SUFFIXES = (".gz", ".dz", ".bz2", ".xz")

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
        with self.path.open("rb") as raw:
            for chunk in _contents(raw, self.path.suffix.lower()):
                self.read += len(chunk)
                self.read_of_file = raw.tell()
                yield chunk


def _contents(raw: IO[bytes], suffix: str) -> Iterator[bytes]:
    """Uncompress a file; everything before a damaged place is there, and nothing behind it is left out in silence."""
    if suffix == ".bz2":
        return _uncompressed(raw, bz2.BZ2Decompressor)
    if suffix == ".xz":
        return _uncompressed(raw, lzma.LZMADecompressor)
    if suffix in SUFFIXES:
        return iter(partial(gzip.GzipFile(fileobj=raw).read1, _CHUNK), b"")
    return iter(partial(raw.read, _CHUNK), b"")


def _uncompressed(raw: IO[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Uncompress a file of one stream or of many, as Wikipedia's are.

    `bz2.open` and `lzma.open` take a stream that is damaged near its beginning, and all behind it, for padding.

    Args:
        raw: The file.
        new: Makes a decompressor of one stream.

    Yields:
        Its bytes, up to a megabyte each.

    Raises:
        EOFError: If the last stream has no end. A damaged stream raises what its decompressor does.
    """
    decompressor, data = new(), raw.read(_CHUNK)
    while True:
        if found := decompressor.decompress(data, _CHUNK):
            yield found
        if decompressor.eof:
            data = decompressor.unused_data.lstrip(b"\0") or raw.read(_CHUNK).lstrip(b"\0")
            if not data:
                return
            decompressor = new()
        elif decompressor.needs_input:
            data = raw.read(_CHUNK)
            if not data:
                raise EOFError("a stream has no end")
        else:
            data = b""


def base_suffix(path: Path) -> str:
    """The suffix of a file's name without that of its compression.

    Args:
        path: The file.

    Returns:
        Such as `.txt` for `book.txt.gz`, in lower case; empty where there is none.
    """
    name = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    return name.suffix.lower()
