"""The source files of a corpus: which they are, and their forms, found from what they contain."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import fsspec

from torch_thor.errors import require
from torch_thor.training.data.listing import LeftOut, files_in, refuse_a_link_to_nothing

PYTHON = "python"  # given instead of a path: the language reference that every Python contains
HUB = "hub"  # the form of a data set of the hub
PART = 1 << 16  # number of bytes after which a text file is cut at the next blank line
CHUNK = 1 << 20
LARGEST = 1 << 25  # bytes of a document; Beautiful Soup needs 45 times as much memory
_BLANK = rb"\n[ \t\r]*\n"
# What files may contain, and where their documents are cut: where a pattern matches after a number
# of bytes, or at a line's or a word's end after another number of bytes without a match.
FORMS = {
    "text": ("text with blank lines between paragraphs", _BLANK, PART, CHUNK),
    "bert": (
        "BERT's format, a sentence a line and a blank line after a document",
        _BLANK,
        0,
        CHUNK,
    ),
    "html": ("HTML", rb"(?!)", 0, LARGEST),
    "doc": ("WikiExtractor's <doc>", rb"</doc>\s*", 0, LARGEST),
    "jsonl": ("JSON, an object with a text a line", rb"\n", 0, LARGEST),
    "parquet": ("Parquet with a column of texts", rb"\n", 0, LARGEST),  # its rows become JSON
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
_HUB_NAME = re.compile(r"([\w.-]+)/[\w.-]+(:[\w.-]+)?")


def find_sources(given: Sequence[str], form: str | None, left: LeftOut) -> list[dict[str, Any]]:
    """Find the files that are given, and those in given folders; counts what is left out."""
    # It refuses what would be read twice or never. `form` is that of all files, if given.
    require(bool(given), "no source: name text files or folders, a data set of the hub, or python")
    found: dict[str, dict[str, Any]] = {}
    # not resolved, because the name of a link says what kind of file it is
    tops = [Path(os.path.normpath(Path(place).absolute())) for place in given]
    # as many parts of the given paths belong to the names as tell them apart
    depth = next(n for n in count(1) if len({top.parts[-n:] for top in tops}) == len({*tops}))
    for place, top in zip(given, tops, strict=True):
        if place == PYTHON or _is_of_the_hub(place):
            own = {place: {"path": place, "name": place, "form": {PYTHON: PYTHON}.get(place, HUB)}}
        else:
            require(top.exists(), f"{place} does not exist: name a text file or a folder of files")
            files = {str(top): _form_of(top, form, named=True)}
            if top.is_dir():
                files = files_in(top, left, lambda here, name: _form_of(Path(here, name), form))
            own = {
                path: _source(Path(path), files[path], len(top.parts) - depth)
                for path in sorted(files, key=Path)
                if files[path]
            }
        require(
            bool(own),
            f"{place} is and holds no file of a known kind: give names that end in "
            f"{', '.join(_BY_SUFFIX)} (perhaps with {', '.join(_COMPRESSED)}), JSON lines or <doc> "
            f"elements, or say with --format what it is ({', '.join(FORMS)})",
        )
        for path, source in own.items():
            other = found.setdefault(os.path.realpath(path), source)
            require(
                other is source,
                f"{path} is given twice, the first time as {other['path']}: leave one out",
            )
    return list(found.values())


def _source(path: Path, form: str | None, above: int) -> dict[str, Any]:
    """Describe a file; the parts of its path that are `above` do not belong to its name."""
    name = str(Path(*path.parts[max(0, above) :])).encode("utf-8", "backslashreplace").decode()
    stat = path.stat()
    # a file that has changed is recognised by the last two
    return {
        "path": str(path), "name": name, "form": form, "size": stat.st_size,
        "modified": stat.st_mtime_ns,
    }  # fmt: skip


def _is_of_the_hub(place: str) -> bool:
    """Return whether a source may be a data set of the hub, perhaps with a configuration."""
    local = Path(place).parent.exists() or _suffix(Path(place)) in _BY_SUFFIX
    return not local and _HUB_NAME.fullmatch(place) is not None


def _suffix(path: Path) -> str:
    """Return the suffix before a compression's."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def opened(path: Path | str) -> Any:
    """Open a file to read what is compressed in it."""
    return fsspec.open(path, compression="gzip" if str(path).lower().endswith(".dz") else "infer")


def _form_of(path: Path, chosen: str | None, *, named: bool = False) -> str | None:
    """Find the form of a file from what it contains, or None if it is of no known kind."""
    # a file that the user has not named is only opened if its name may be that of a text
    refuse_a_link_to_nothing(path, "text")
    if not path.is_file() or not (named or _suffix(path) in {*_BY_SUFFIX, ".json", ".xml", ""}):
        return None
    begin = b""
    with suppress(Exception), opened(path) as file:  # of a damaged file reading tells
        begin = file.read1(PART).removeprefix(b"\xef\xbb\xbf").lstrip()
    signs = (form for form, sign in _SIGNS.items() if re.match(sign, begin))
    form = next(signs, _BY_SUFFIX.get(_suffix(path)))
    require(
        form != "dump",
        f"{path} is a raw dump of a wiki: give cleaned articles, best those of wikimedia/wikipedia "
        "(a folder of its Parquet files or, for English, wikimedia/wikipedia:20231101.en), or "
        f"extract them: pip install wikiextractor; wikiextractor {path.name} --json -o extracted",
    )
    is_of_bert = form == "text" and _is_of_bert(begin.decode(errors="replace"))
    return chosen if chosen and (named or form) else "bert" if is_of_bert else form


def _is_of_bert(text: str) -> bool:
    """Return whether most blocks have two or more lines, 90 % of which end a sentence."""
    blocks = [block.split("\n") for block in re.split(r"\n\s*\n", text.strip())]
    several = [block for block in blocks if len(block) > 1]
    ends = [_SENTENCE_END.search(line) is not None for line in chain.from_iterable(several)]
    # a list of sentences without any blank line says nothing of documents
    return 2 * len(several) > len(blocks) > 1 and sum(ends) >= 0.9 * len(ends)
