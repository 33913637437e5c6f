"""The source files of a corpus, cut into pieces that can be read independently of each other.

A piece is a page of a Wikipedia dump, an HTML file, or a text file; a long text file is cut at blank lines, so that
memory use does not depend on its size. The files are read as streams of bytes.
"""

import bz2
import gzip
import lzma
import os
import pydoc_data.topics
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch_thor.training.errors import UserError, require
from torch_thor.training.text.documents import Piece, fault, paragraphs_of
from torch_thor.training.text.wikipedia import pages

PYTHON = "python"  # given instead of a path: the language reference that every Python installation contains
TEXT, HTML, DUMP = (".txt", ".text", ".md", ".rst", ".pod", ".dict"), (".html", ".htm", ".xhtml"), (".xml",)
KINDS = (*TEXT, *HTML, *DUMP)
COMPRESSED: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open, ".dz": gzip.open, ".xz": lzma.open}
UNIT = 1 << 22  # approximate number of bytes of source text in a unit
PART = 1 << 16  # number of bytes after which a text file is cut at the next blank line
_LONGEST = 1 << 20  # number of bytes after which a text without a blank line is cut
_BLANK = re.compile(rb"\n[ \t\r]*\n")
# What the decompressors raise for truncated or damaged data; gzip's BadGzipFile is an OSError.
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True)
class Source:
    """One source file, as it was found.

    Args:
        path: The path of the file, or `python`.
        name: The name of the file in messages and in the names of documents, which does not say where it lies.
        size: The size of the file on disk in bytes.
        modified: The time of the last modification, in nanoseconds since the epoch.
    """

    path: str
    name: str
    size: int
    modified: int


@dataclass
class Unit:
    """A few megabytes of source text, which are processed as a whole; they do not depend on the number of processes."""

    number: int
    pieces: list[Piece]
    faults: list[str]


def find_sources(given: Sequence[str]) -> list[Source]:
    """Find the files of a corpus.

    Args:
        given: Paths of dumps, text files, HTML files, and folders of such files; `python` for the language reference
            that every Python installation contains.

    Returns:
        The files in the given order. The files of a folder are sorted by path; links in it are followed, and a file
        that is reached in several ways is listed once.

    Raises:
        UserError: If a path does not exist, has no file of a known kind, or cannot be listed, or a source is given
            twice.
    """
    require(bool(given), "no source: name a Wikipedia dump, text files or folders, or python")
    found: list[Source] = []
    for one in given:
        # not resolved, because the name of a link says what kind of file it is
        top = Path(os.path.normpath(Path(one).absolute()))
        for path in [Path(PYTHON)] if one == PYTHON else _files(one, top):
            name = (
                one if one == PYTHON else str(path.relative_to(top.parent)).encode("utf-8", "backslashreplace").decode()
            )
            there = one != PYTHON and path.exists()  # a link to nothing is a fault when it is read
            found.append(Source(str(path), name, *((s := path.stat()).st_size, s.st_mtime_ns) if there else (0, 0)))
    places, names = ([getattr(one, key) for one in found] for key in ("path", "name"))
    require(len(set(map(os.path.realpath, places))) == len(found), "a source is given twice: name each once")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    require(twice is None, f"two sources have the name {twice}: rename one, or name the folder that contains both")
    return found


def _files(one: str, top: Path) -> list[Path]:
    require(top.exists(), f"{one} does not exist: name a Wikipedia dump, a text file or a folder of text files")
    kinds = f"{', '.join(KINDS)}, perhaps with {', '.join(COMPRESSED)}"
    if not top.is_dir():
        require(_kind(top) in KINDS, f"{one} is of no known kind: names end in {kinds}")
        return [top]
    found: dict[str, Path] = {}  # by the path without links
    seen: set[str] = set()
    for here, folders, names in os.walk(top, followlinks=True, onerror=_refuse):
        folders.sort()
        if os.path.realpath(here) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(here))
        for path in sorted(Path(here) / name for name in names if _kind(Path(name)) in KINDS):
            # opening a pipe would wait for ever
            regular = path.is_file() or not path.exists()
            require(regular, f"{path} is not a regular file (a pipe, socket or device): move it out of the folder")
            found.setdefault(os.path.realpath(path), path)
    require(bool(found), f"{one} holds no file ending in {kinds}")
    return sorted(found.values())


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be listed ({error.strerror}): make it readable, or name other folders")


def _kind(path: Path) -> str:
    """Return the suffix of a name without that of the compression, in lower case."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def units(sources: Sequence[Source], opened: Callable[[Path], IO[bytes]]) -> Iterator[Unit]:
    """Read sources, which `opened` opens, as units of about `UNIT` bytes."""
    size, unit = 0, Unit(0, [], [])
    for source in sources:
        for piece in _python() if source.path == PYTHON else _pieces(source, opened):
            if isinstance(piece, str):
                unit.faults.append(piece)
                continue
            unit.pieces.append(piece)
            size += len(piece.data)
            if size >= UNIT:
                yield unit
                size, unit = 0, Unit(unit.number + 1, [], [])
    if unit.pieces or unit.faults:
        yield unit


def _pieces(source: Source, opened: Callable[[Path], IO[bytes]]) -> Iterator[Piece | str]:
    """Cut a file; yields pieces, and descriptions of faults. What comes before damaged data is kept."""
    path, name, done, faults = Path(source.path), source.name, 0, []

    def chunks() -> Iterator[bytes]:
        nonlocal done
        try:
            with opened(path) as raw:
                unpack = COMPRESSED.get(path.suffix.lower())
                read_some: Callable[[int], bytes] = raw.read if unpack is None else unpack(raw).read1
                while chunk := read_some(1 << 20):
                    done += len(chunk)
                    yield chunk
        except _DAMAGED as error:
            cause = f"it cannot be read ({error.strerror})" if isinstance(error, OSError) and error.errno else None
            faults.append(fault(name, done, cause or f"the compressed data end here or are damaged ({error})"))

    if _kind(path) in DUMP:
        for offset, page in pages(chunks()):
            yield fault(name, offset, page) if isinstance(page, str) else Piece("page", name, "", offset, page)
    elif _kind(path) in HTML:
        yield Piece("html", name, name, 0, b"".join(chunks()))
    else:
        yield from _parts(name, chunks())
    yield from faults


def _parts(name: str, chunks: Iterable[bytes]) -> Iterator[Piece]:
    """Cut a text file at blank lines; a text without them at a line's or a word's end."""
    rest, offset, number = bytearray(), 0, 0
    for chunk in chunks:
        rest += chunk
        while len(rest) > PART:
            blank = _BLANK.search(rest, PART)
            if blank is None and len(rest) < _LONGEST:
                break
            cut = blank.end() if blank else _place_to_cut(rest)
            number += 1
            yield Piece("text", name, f"{name}#{number}", offset, bytes(rest[:cut]))
            del rest[:cut]
            offset += cut
    yield Piece("text", name, f"{name}#{number + 1}" if number else name, offset, bytes(rest))


def _place_to_cut(text: bytearray) -> int:
    return text.rfind(b"\n", 0, PART) + 1 or text.rfind(b" ", 0, PART) + 1 or PART


def _python() -> Iterator[Piece]:
    seen: set[str] = set()
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        found = [paragraph for paragraph in paragraphs_of(text) if paragraph not in seen]  # many are in several topics
        seen.update(found)
        yield Piece("text", PYTHON, f"{PYTHON}:{topic}", 0, "\n\n".join(found).encode())
