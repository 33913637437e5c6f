"""The source files of a corpus, cut into pieces that can be read independently of each other.

A piece is a page of a Wikipedia dump, an HTML file, or a text file; a long text file is cut at
blank lines, and a dump at `</page>`, which no page contains because its text is escaped. Files are
read as streams of bytes, so that memory use does not depend on their size, and a page that is not
well-formed affects no other page.
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
from itertools import count
from pathlib import Path
from typing import IO, Any

from torch_thor.errors import UserError, require
from torch_thor.training.data.listing import LeftOut
from torch_thor.training.text.documents import Piece, fault, paragraphs_of

# given instead of a path: the language reference that every Python installation contains
PYTHON = "python"
TEXT, HTML, DUMP = (
    (".txt", ".text", ".md", ".rst", ".pod", ".dict"),
    (".html", ".htm", ".xhtml"),
    (".xml",),
)
COMPRESSED: dict[str, Any] = {
    ".bz2": bz2.open,
    ".gz": gzip.open,
    ".dz": gzip.open,
    ".xz": lzma.open,
}
_KINDS = (
    f"a name that ends in {', '.join((*TEXT, *HTML, *DUMP))}, perhaps with {', '.join(COMPRESSED)}"
)
UNIT = 1 << 22  # approximate number of bytes of source text in a unit
PART = 1 << 16  # number of bytes after which a text file is cut at the next blank line
_LONGEST = 1 << 20  # number of bytes after which a text without a blank line is cut
LARGEST_PAGE = 1 << 26  # bytes; the largest pages of Wikipedia have about 2 MB
_BLANK = re.compile(rb"\n[ \t\r]*\n")
_BEGIN, _END = b"<page>", b"</page>"
# What the decompressors raise for truncated or damaged data; gzip's BadGzipFile is an OSError.
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True)
class Source:
    """One source file, as it was found; `name` does not say where it lies."""

    path: str
    name: str
    size: int
    modified: int  # in nanoseconds


@dataclass
class Unit:
    """A few megabytes of source text, which are processed as a whole.

    Units do not depend on the number of processes.
    """

    number: int
    pieces: list[Piece]
    faults: list[str]


def find_sources(given: Sequence[str], say: Callable[[str], None] = lambda _: None) -> list[Source]:
    """Find the files that are given, and those in given folders, sorted; says what is left out."""
    # It refuses what would be read twice or never.
    require(bool(given), "no source: name a Wikipedia dump, text files or folders, or python")
    found: list[Source] = []
    # not resolved, because the name of a link says what kind of file it is
    tops = {
        place: Path(os.path.normpath(Path(place).absolute())) for place in given if place != PYTHON
    }
    distinct = set(tops.values())
    # as many parts of the given paths belong to the names as tell them apart
    depth = next(n for n in count(1) if len({top.parts[-n:] for top in distinct}) == len(distinct))
    for place in given:
        if place == PYTHON:
            found.append(Source(PYTHON, PYTHON, 0, 0))
            continue
        top = tops[place]
        require(
            top.exists(),
            f"{place} does not exist: name a Wikipedia dump, a text file or a folder of text files",
        )
        paths = _inside(top, say) if top.is_dir() else [top] if _kind(top) else []
        require(bool(paths), f"{place} is and holds no file of a known kind: give {_KINDS}")
        for path in paths:
            require(
                path.is_file(),
                f"{path} is not a regular file, or a link to nothing: move it out of the folder",
            )
            name = (
                str(Path(*path.parts[max(0, len(top.parts) - depth) :]))
                .encode("utf-8", "backslashreplace")
                .decode()
            )
            found.append(Source(str(path), name, path.stat().st_size, path.stat().st_mtime_ns))
    known: dict[str, Source] = {}
    for one in found:
        other = known.setdefault(os.path.realpath(one.path), one)
        require(
            other is one,
            f"{one.path} is given twice, the first time as {other.path}: leave one out",
        )
    return found


def _inside(top: Path, say: Callable[[str], None]) -> list[Path]:
    """Return the files of known kinds in a folder, sorted."""

    def refuse(error: OSError) -> None:
        raise UserError(
            f"{error.filename} cannot be listed ({error.strerror}): make it readable or name other "
            "folders"
        )

    found, left = [], LeftOut()
    for here, folders, names in os.walk(top, onerror=refuse):
        folders[:] = filter(left.keeps, folders)
        for path in (Path(here) / name for name in folders):
            require(
                not path.is_symlink(),
                f"{path} is a link to a folder: name that folder too, and remove the link",
            )
        for path in (Path(here) / name for name in filter(left.keeps, names)):
            if _kind(path):
                found.append(path)
            else:
                left.other(path.name)
    left.tell(top, "text", say)
    return sorted(found)


def _kind(path: Path) -> str | None:
    """Return `page`, `html` or `text` by the suffix before a compression's, or None if unknown."""
    suffix = (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()
    return (
        "page"
        if suffix in DUMP
        else "html"
        if suffix in HTML
        else "text"
        if suffix in TEXT
        else None
    )


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
    """Cut a file, and yield pieces and descriptions of faults."""
    # What comes before damaged data is kept.
    path, name, done, faults = Path(source.path), source.name, 0, []

    def chunks() -> Iterator[bytes]:
        nonlocal done
        try:
            with opened(path) as raw:
                unpack = COMPRESSED.get(path.suffix.lower())
                read_some: Callable[[int], bytes] = (
                    raw.read if unpack is None else unpack(raw).read1
                )
                while chunk := read_some(1 << 20):
                    done += len(chunk)
                    yield chunk
        except _DAMAGED as error:
            faults.append(
                fault(
                    name,
                    done,
                    f"it cannot be read, or the compressed data end here or are damaged ({error})",
                )
            )

    match _kind(path):
        case "page":
            yield from _pages(name, chunks())
        case "html":
            yield Piece("html", name, name, 0, b"".join(chunks()))
        case _:
            yield from _parts(name, chunks())
    yield from faults


def _pages(name: str, chunks: Iterable[bytes]) -> Iterator[Piece | str]:
    """Cut a dump after each page; yields faults for what is none."""
    rest, offset, found = b"", 0, False  # offset: that of the first byte of `rest` in the dump
    for chunk in chunks:
        *ended, rest = (rest + chunk).split(_END)
        for text in ended:
            if (number := text.count(_BEGIN)) != 1:
                yield fault(
                    name, offset, f"{number} times {_BEGIN.decode()} before {_END.decode()}"
                )
            # from the last <page> on: of a page without an end, the page after it is kept
            if number:
                begin = text.rindex(_BEGIN)
                yield Piece("page", name, "", offset + begin, text[begin:] + _END)
            offset, found = offset + len(text) + len(_END), True
        if len(rest) > LARGEST_PAGE:
            yield fault(
                name, offset, f"more than {LARGEST_PAGE >> 20} MB without the end of a page"
            )
            offset, rest = offset + len(rest) - len(_BEGIN), rest[-len(_BEGIN) :]
    if not found:
        yield fault(name, 0, "it has no whole <page>: is it a Wikipedia dump?")
    elif b"</mediawiki>" not in rest:
        yield fault(name, offset, "the dump ends without </mediawiki>: it is cut short")


def _parts(name: str, chunks: Iterable[bytes]) -> Iterator[Piece]:
    """Cut a text file at blank lines; a text without them at a line's or a word's end."""
    rest, offset, number = bytearray(), 0, 0
    for chunk in chunks:
        rest += chunk
        while len(rest) > PART and ((blank := _BLANK.search(rest, PART)) or len(rest) >= _LONGEST):
            cut = (
                blank.end()
                if blank
                else rest.rfind(b"\n", 0, PART) + 1 or rest.rfind(b" ", 0, PART) + 1 or PART
            )
            number += 1
            yield Piece("text", name, f"{name}#{number}", offset, bytes(rest[:cut]))
            del rest[:cut]
            offset += cut
    yield Piece("text", name, f"{name}#{number + 1}" if number else name, offset, bytes(rest))


def _python() -> Iterator[Piece]:
    seen: set[str] = set()
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        # many are in several topics
        found = [paragraph for paragraph in paragraphs_of(text) if paragraph not in seen]
        seen.update(found)
        yield Piece("text", PYTHON, f"{PYTHON}:{topic}", 0, "\n\n".join(found).encode())
