"""The source files of a corpus: their forms, found from what they contain, cut into documents.

Files are read as streams, so that memory use does not depend on their size. What cannot be read is
a piece of the form `FAULT`; the documents before it in the file are kept.
"""

import json
import os
import pydoc_data.topics
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset
from huggingface_hub import HfApi

from torch_thor.errors import UserError, first_line, require
from torch_thor.training.data.listing import LeftOut, files_in, refuse_a_link_to_nothing
from torch_thor.training.text.documents import FAULT, paragraphs_of

PYTHON = "python"  # given instead of a path: the language reference that every Python contains
PART = 1 << 16  # number of bytes after which a text file is cut at the next blank line
_CHUNK = 1 << 20
LARGEST = 1 << 25  # bytes of a document; Beautiful Soup needs 45 times as much memory
_BLANK = rb"\n[ \t\r]*\n"
# What files may contain, and where their documents are cut: where a pattern matches after a number
# of bytes, or at a line's or a word's end after another number of bytes without a match.
FORMS = {
    "text": ("text with blank lines between paragraphs", _BLANK, PART, _CHUNK),
    "bert": (
        "BERT's format, a sentence a line and a blank line after a document",
        _BLANK,
        0,
        _CHUNK,
    ),
    "html": ("HTML", rb"(?!)", 0, LARGEST),
    "doc": ("WikiExtractor's <doc>", rb"</doc>\s*", 0, LARGEST),
    "jsonl": ("JSON, an object with a text a line", rb"\n", 0, LARGEST),
    "parquet": ("Parquet with a column of texts", rb"", 0, 0),
}
_BY_SUFFIX = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".pod", ".dict"), "text"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".dz", ".bz2", ".xz")
# what files begin with, whatever their names are
_SIGNS = {
    "dump": rb"(<\?xml[^>]*>\s*)?<mediawiki",
    "parquet": rb"PAR1",
    "doc": rb"<doc ",
    "jsonl": rb'\{[^\n]*"text"\s*:',
}
_SENTENCE_END = re.compile(r"[.!?…:;。！？．।॥۔؟።།]['\"”’»)\]]*\s*$")
# characters of scripts other than Latin, Greek and Cyrillic, also as JSON may write them
_OTHERS = re.compile(
    "[\u0590-\u1cff\u2e80-\ud7ff\uf900-\ufdff\U00020000-\U0003ffff]"
    r"|\\u(?:0[6-9a-f]|1[0-9a-c]|[3-9a-d])"
)
_HUB_NAME = re.compile(r"([\w.-]+)/[\w.-]+(:[\w.-]+)?")


class Source(NamedTuple):
    """One source file, as it was found; `name` does not say where it lies."""

    path: str
    name: str
    size: int
    modified: int  # in nanoseconds
    form: str


def find_sources(given: Sequence[str], form: str | None, left: LeftOut) -> list[Source]:
    """Find the files that are given, and those in given folders; counts what is left out."""
    # It refuses what would be read twice or never. `form` is that of all files, if given.
    require(bool(given), "no source: name text files or folders, a data set of the hub, or python")
    found: dict[str, Source] = {}
    # not resolved, because the name of a link says what kind of file it is
    tops = [Path(os.path.normpath(Path(place).absolute())) for place in given]
    # as many parts of the given paths belong to the names as tell them apart
    depth = next(n for n in count(1) if len({top.parts[-n:] for top in tops}) == len({*tops}))
    require(len({*tops}) == len(tops), f"{' '.join(given)}: a source is given twice: leave one out")
    for place, top in zip(given, tops, strict=True):
        if place == PYTHON or _is_of_the_hub(place):
            form_ = PYTHON if place == PYTHON else "hub"
            found[place] = Source(place, place, 0, 0, form_)
            continue
        if top.is_dir():
            forms = files_in(top, left, lambda here, name: _form_of(Path(here, name), form))
            own = {path: forms[path] for path in sorted(forms, key=Path)}
        else:
            require(top.exists(), f"{place} does not exist: name a text file or a folder of files")
            own = {str(top): kind} if (kind := _form_of(top, form, named=True)) else {}
        require(
            bool(own),
            f"{place} is and holds no file of a known kind: give names that end in "
            f"{', '.join(_BY_SUFFIX)} (perhaps with {', '.join(_COMPRESSED)}), JSON lines or <doc> "
            f"elements, or say with --format what it is ({', '.join(FORMS)})",
        )
        for path, kind in own.items():
            one = _source(Path(path), kind, len(top.parts) - depth)
            other = found.setdefault(os.path.realpath(path), one)
            require(
                other is one,
                f"{path} is given twice, the first time as {other.path}: leave one out",
            )
    return list(found.values())


def _source(path: Path, form: str, above: int) -> Source:
    """Describe a file; the parts of its path that are `above` do not belong to its name."""
    name = str(Path(*path.parts[max(0, above) :])).encode("utf-8", "backslashreplace").decode()
    found = path.stat()
    return Source(str(path), name, found.st_size, found.st_mtime_ns, form)


def _is_of_the_hub(place: str) -> bool:
    """Return whether a source may be a data set of the hub, perhaps with a configuration."""
    match = _HUB_NAME.fullmatch(place)
    local = match is None or Path(place).exists() or Path(match[1]).is_dir()
    return not local and _suffix(Path(place)) not in _BY_SUFFIX


def _suffix(path: Path) -> str:
    """Return the suffix before a compression's."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def _form_of(path: Path, chosen: str | None, *, named: bool = False) -> str | None:
    """Find the form of a file from what it contains, or None if it is of no known kind."""
    # a file that the user has not named is only opened if its name may be that of a text
    refuse_a_link_to_nothing(path, "text")
    may_be_text = named or _suffix(path) in {*_BY_SUFFIX, ".json", ".xml", ""}
    if not (may_be_text and path.is_file()):
        return None
    begin = b""
    with suppress(Exception):  # a damaged file: reading it tells
        begin = next(_chunks(path, PART)).removeprefix(b"\xef\xbb\xbf").lstrip()
    signs = (form for form, sign in _SIGNS.items() if re.match(sign, begin))
    form = next(signs, _BY_SUFFIX.get(_suffix(path)))
    require(
        form != "dump",
        f"{path} is a raw dump of a wiki: give cleaned articles, best those of wikimedia/wikipedia "
        "(a folder of its Parquet files or, for English, wikimedia/wikipedia:20231101.en), or "
        f"extract them: pip install wikiextractor; wikiextractor {path.name} --json -o extracted",
    )
    if form == "text" and _is_of_bert(begin.decode(errors="replace")):
        form = "bert"
    return chosen if chosen and (named or form) else form


def _is_of_bert(text: str) -> bool:
    """Return whether most blocks have two or more lines, 90 % of which end a sentence."""
    blocks = [block.split("\n") for block in re.split(r"\n\s*\n", text.strip())]
    several = [block for block in blocks if len(block) > 1]
    lines = list(chain.from_iterable(several))
    ending = sum(_SENTENCE_END.search(line) is not None for line in lines)
    # a list of sentences without any blank line says nothing of documents
    return 2 * len(several) > len(blocks) > 1 and ending >= 0.9 * len(lines)


def pieces(source: Source, cache: Path) -> Iterator[dict[str, Any]]:
    """Read what may be documents of a source; a data set of the hub comes to a cache."""
    try:
        match source.form:
            case "python":
                yield from _python()
            case "hub":
                yield from _of_rows(source.name, _of_the_hub(source.path, cache))
            case "parquet":
                yield from _of_rows(source.name, _of_parquet(source.path))
            case form:
                yield from _cut(form, source.name, _chunks(Path(source.path), _CHUNK))
    except UserError:
        raise
    except Exception as error:  # each kind of file has errors of its own
        reason = f"it cannot be read, or its data end or are damaged from here on ({error})"
        yield _piece(FAULT, source.name, reason.encode())


def has_other_scripts(sources: Sequence[Source], cache: Path) -> bool:
    """Return whether 1 % of a sample of the text is not Latin, Greek or Cyrillic."""
    sampled = sources[:: len(sources) // 200 + 1]
    begins = (piece for source in sampled for piece in islice(pieces(source, cache), 20))
    texts = [piece["data"].decode(errors="ignore") for piece in begins]
    return sum(len(_OTHERS.findall(text)) for text in texts) >= 0.01 * sum(map(len, texts)) > 0


def _piece(form: str, name: str, data: bytes, offset: int = 0) -> dict[str, Any]:
    return {"form": form, "name": name, "offset": offset, "data": data}


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    """Read a file, uncompressed."""
    packed = "gzip" if path.suffix.lower() == ".dz" else "infer"
    with fsspec.open(path, compression=packed) as file:
        yield from iter(lambda: file.read1(size), b"")


def _cut(form: str, name: str, chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Cut a file at the ends of its documents."""
    _, pattern, least, longest = FORMS[form]
    end, rest, offset, number = re.compile(pattern), bytearray(), 0, 0
    for chunk in chunks:
        rest += chunk
        while len(rest) > least and ((found := end.search(rest, least)) or len(rest) >= longest):
            cut = (
                found.end()
                if found
                else rest.rfind(b"\n", 0, PART) + 1 or rest.rfind(b" ", 0, PART) + 1 or PART
            )
            number += 1
            yield _piece(form, f"{name}#{number}", bytes(rest[:cut]), offset)
            del rest[:cut]
            offset += cut
    if rest.strip() or not number:
        last = f"{name}#{number + 1}" if number else name
        yield _piece(form, last, bytes(rest), offset)


def _of_rows(name: str, rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, 1):
        yield _piece("jsonl", f"{name}#{number}", json.dumps(row, default=str).encode())


def _of_parquet(path: str) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(256):
            yield from batch.to_pylist()


def _of_the_hub(place: str, cache: Path) -> Iterator[Any]:
    name, _, configuration = place.partition(":")
    try:
        HfApi().dataset_info(name, timeout=10)  # without a network it does not try again and again
        found = load_dataset(name, configuration or None, split="train", cache_dir=str(cache))
    except Exception as error:  # of the network, of the hub, of the data
        raise UserError(
            f"{place} is no file here, and cannot be had from the hub ({first_line(error)}): give "
            "a folder of its files, or try where there is a network"
        ) from error
    for file in found.cache_files:  # one at a time, because what is mapped counts as memory
        yield from Dataset.from_file(file["filename"])


def _python() -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        # many are in several topics
        found = [paragraph for paragraph in paragraphs_of(text) if paragraph not in seen]
        seen.update(found)
        yield _piece("text", f"{PYTHON}:{topic}", "\n\n".join(found).encode())
