"""Files read as streams of bytes. The suffix of the name selects the decompression: .gz, .dz, .bz2 or .xz."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

# The exceptions that the decompressors raise for truncated or damaged data; gzip's BadGzipFile is an OSError.
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)

SUFFIXES = (".gz", ".dz", ".bz2", ".xz")

_CHUNK = 1 << 20


class ByteStream:
    """The uncompressed bytes of a file in chunks, with the number of bytes read so far.

    Args:
        path: The path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0  # number of uncompressed bytes read so far
        self.read_of_file = 0  # number of bytes read so far from the file on disk

    def __iter__(self) -> Iterator[bytes]:
        """Read the file from its beginning.

        Yields:
            Chunks of uncompressed bytes, at most 1 MiB each. If compressed data are truncated or damaged, one of the
            exceptions in `DAMAGED` is raised.
        """
        with self.path.open("rb") as raw:
            for chunk in _contents(raw, self.path.suffix.lower()):
                self.read += len(chunk)
                self.read_of_file = raw.tell()
                yield chunk


def _contents(raw: IO[bytes], suffix: str) -> Iterator[bytes]:
    """Uncompress a file. Data before a damaged position are returned; damage always raises an exception."""
    if suffix == ".bz2":
        return _uncompressed(raw, bz2.BZ2Decompressor)
    if suffix == ".xz":
        return _uncompressed(raw, lzma.LZMADecompressor)
    if suffix in SUFFIXES:
        return iter(partial(gzip.GzipFile(fileobj=raw).read1, _CHUNK), b"")
    return iter(partial(raw.read, _CHUNK), b"")


def _uncompressed(raw: IO[bytes], new: Callable[[], Any]) -> Iterator[bytes]:
    """Uncompress a file of one or more concatenated streams; Wikipedia dumps may have many streams.

    `bz2.open` and `lzma.open` are not used: if a stream is damaged near its beginning, they treat it and all data after
    it as padding and report no error.

    Args:
        raw: The file, opened for reading in binary mode.
        new: Creates a decompressor for one stream.

    Yields:
        Chunks of uncompressed bytes, at most 1 MiB each.

    Raises:
        EOFError: If the last stream is truncated. For a damaged stream, the decompressor raises its own exception.
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
    """Return the suffix of a file name, ignoring the suffix of the compression.

    Args:
        path: The path of the file.

    Returns:
        The suffix in lower case, for example `.txt` for `book.txt.gz`; empty if there is no such suffix.
    """
    name = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    return name.suffix.lower()
