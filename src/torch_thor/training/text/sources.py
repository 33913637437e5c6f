"""The source files of a corpus, and their division into work units.

A work unit is a few megabytes of source text. The division does not depend on the number of processes. Therefore the
shards are the same for any number of processes, and a finished unit is never processed again.
"""

import itertools
import os
import pydoc_data.topics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_thor.training.errors import require
from torch_thor.training.text.compressed import DAMAGED, SUFFIXES, ByteStream, base_suffix
from torch_thor.training.text.document import Document, Fault
from torch_thor.training.text.listing import files_below
from torch_thor.training.text.text_files import HTML, TEXT, documents_of, paragraphs_of
from torch_thor.training.text.wikipedia import PageCutter, RawPage

UNIT = 1 << 22  # approximate number of bytes of source text in a unit
PYTHON = "python"  # given instead of a path; selects the language reference in every Python installation
_DUMP = ".xml"


@dataclass(frozen=True)
class Source:
    """One source file of a corpus.

    Args:
        path: The path of the file, or `python` for the language reference of the running Python.
        name: The name of the file in messages and in the names of documents.
        size: The size of the file on disk in bytes, compressed if the file is compressed.
        modified: The time of the last modification, in nanoseconds since the epoch.
    """

    path: str
    name: str
    size: int
    modified: int

    @property
    def is_dump(self) -> bool:
        """Whether the file is a Wikipedia dump."""
        return self.path != PYTHON and base_suffix(Path(self.path)) == _DUMP

    def plain(self) -> dict[str, Any]:
        """Return the fields, which identify this version of the file, as JSON values."""
        return asdict(self)


@dataclass
class Unit:
    """One work unit: a part of the source text that is processed as a whole.

    Args:
        number: The index of the unit, counted from 0 over all sources.
        source: The name of the dump that contains the pages; empty if the unit holds documents of text files.
        header: The bytes before the first page of the dump.
        pages: Pages of a dump.
        documents: Documents of text files.
        faults: The faults that were found since the end of the previous unit.
        read: Number of bytes, as stored on disk, that have been read from all sources at the end of the unit.
    """

    number: int
    source: str = ""
    header: bytes = b""
    pages: list[RawPage] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    read: int = 0

    @property
    def size(self) -> int:
        """The size of the unit: the bytes of its pages plus the characters of its documents."""
        return sum(len(page.xml) for page in self.pages) + sum(
            len(paragraph) for document in self.documents for paragraph in document.paragraphs
        )


def find_sources(given: Sequence[str]) -> list[Source]:
    """Find the files of a corpus.

    Args:
        given: Paths of dumps, text files, HTML files, and folders of such files; `python` for the language reference
            that every Python installation contains.

    Returns:
        The files in the given order. The files of a folder are sorted by path; links in it are followed, and a file
        that is reached in several ways is listed once.

    Raises:
        UserError: If a path does not exist, is a file of an unknown type, is a folder without a supported file, a
            folder cannot be listed, or if a source is given twice.
    """
    files = {one: _files(one) for one in given}
    places = [path for paths in files.values() for path in paths]
    require(
        len(files) == len(given) and len({os.path.realpath(path) for path in places}) == len(places),
        "a source is given twice: name each once",
    )
    # names contain only as many parent folders as make them unique, so that they do not depend on the full path
    parents, names = 0, [""] * len(places)
    while parents == 0 or len(set(names)) < len(names):
        parents += 1
        names = [_name(one, path, parents) for one, paths in files.items() for path in paths]
    return [_source(path, name) for path, name in zip(places, names, strict=True)]


def _files(one: str) -> list[Path]:
    """List the files that one given path refers to."""
    if one == PYTHON:
        return [Path(PYTHON)]
    kinds, path = (*TEXT, *HTML, _DUMP), Path(one)
    require(path.exists(), f"{one} does not exist: name a Wikipedia dump, a text file or a folder of text files")
    if not path.is_dir():
        require(
            base_suffix(path) in kinds,
            f"{one} is of no known kind: names end in {', '.join(kinds)}, perhaps with {', '.join(SUFFIXES)}",
        )
        return [_absolute(one)]
    files = files_below(_absolute(one), lambda file: base_suffix(file) in kinds)
    require(bool(files), f"{one} holds no file ending in {', '.join(kinds)} (or these with {', '.join(SUFFIXES)})")
    return files


def _absolute(one: str) -> Path:
    """Make a path absolute. Links are not resolved, because the name of a link says what kind of file it is."""
    return Path(os.path.normpath(Path(one).absolute()))


def _name(one: str, path: Path, parents: int) -> str:
    """Build the name of a file from the last `parents` parts of the given path and the file's path relative to it."""
    if one == PYTHON:
        return PYTHON
    top = _absolute(one)
    name = "/".join((*top.parts[1:][-parents:], *path.relative_to(top).parts))
    return name.encode("utf-8", "backslashreplace").decode()  # names of files need not be UTF-8


def _source(path: Path, name: str) -> Source:
    if path == Path(PYTHON):
        return Source(PYTHON, PYTHON, 0, 0)
    if not path.exists():  # a link to a file that does not exist: a fault when it is read
        return Source(str(path), name, 0, 0)
    status = path.stat()
    return Source(str(path), name, status.st_size, status.st_mtime_ns)


def units_of(sources: Sequence[Source]) -> Iterator[Unit]:
    """Divide sources into units. The files are read as streams.

    Args:
        sources: The source files.

    Yields:
        Units of about `UNIT` bytes. A unit holds either pages of one dump or documents of one or more text files.
    """
    before = list(itertools.accumulate((source.size for source in sources), initial=0))
    numbers = itertools.count()
    pairs = zip(sources, before, strict=False)  # `before` has one more element, the total size
    for is_dump, members in itertools.groupby(pairs, key=lambda pair: pair[0].is_dump):
        for unit in _of_dumps(members) if is_dump else _of_texts(members):
            unit.number = next(numbers)
            yield unit


def _of_dumps(dumps: Iterable[tuple[Source, int]]) -> Iterator[Unit]:
    for source, before in dumps:
        stream, cutter = ByteStream(Path(source.path)), PageCutter(source.name)
        pages: list[RawPage] = []
        size = 0
        try:
            for chunk in stream:
                for page in cutter.feed(chunk):
                    pages.append(page)
                    size += len(page.xml)
                    if size >= UNIT:
                        yield _dump_unit(cutter, pages, before + stream.read_of_file)
                        pages, size = [], 0
        except DAMAGED as error:
            cutter.faults.append(_damaged(source, stream, error))
        else:
            cutter.finish()
        if cutter.header is None and not cutter.faults:
            cutter.faults.append(Fault(source.name, 0, "it has no <page>: is it a Wikipedia dump?"))
        if pages or cutter.faults:
            yield _dump_unit(cutter, pages, before + source.size)


def _dump_unit(cutter: PageCutter, pages: list[RawPage], read: int) -> Unit:
    faults, cutter.faults = cutter.faults, []
    return Unit(0, cutter.source, cutter.header or b"", pages, [], faults, read)


def _of_texts(files: Iterable[tuple[Source, int]]) -> Iterator[Unit]:
    unit, size = Unit(0), 0
    for source, before in files:
        stream = ByteStream(Path(source.path))
        try:
            for found in python_documents() if source.path == PYTHON else documents_of(stream, source.name):
                unit.read = before + min(stream.read_of_file, source.size)
                if isinstance(found, Fault):
                    unit.faults.append(found)
                    continue
                unit.documents.append(found)
                size += sum(len(paragraph) for paragraph in found.paragraphs)
                if size >= UNIT:
                    yield unit
                    unit, size = Unit(0), 0
        except UnicodeDecodeError as error:
            unit.faults.append(Fault(source.name, error.start, "it is not UTF-8: convert it with iconv -t utf-8"))
        except DAMAGED as error:
            unit.faults.append(_damaged(source, stream, error))
        unit.read = before + source.size
    if unit.documents or unit.faults:
        yield unit


def _damaged(source: Source, stream: ByteStream, error: Exception) -> Fault:
    if isinstance(error, OSError) and error.errno is not None:
        return Fault(source.name, stream.read, f"it cannot be read ({error.strerror})")
    return Fault(source.name, stream.read, f"the compressed data end here or are damaged ({error})")


def python_documents() -> Iterator[Document]:
    """Read the language reference that every Python installation contains for `help()`.

    Yields:
        One document for each topic. A paragraph that occurs in several topics is kept only in the first of them.
    """
    seen: set[str] = set()
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        found = tuple(paragraph for paragraph in paragraphs_of(text) if paragraph not in seen)
        seen.update(found)
        if found:
            yield Document(f"{PYTHON}:{topic}", found)
