"""The source files of a corpus: their forms, found from what they contain, and their documents.

Files are read as streams, so that memory use does not depend on their size. What cannot be read is
a document with a fault; those before it in the file are kept.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import pydoc_data.topics
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from html import unescape
from itertools import chain, count
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
from huggingface_hub import HfApi
from sentencex import segment

from torch_thor.errors import first_line, require
from torch_thor.training.data.listing import LeftOut, files_in, refuse_a_link_to_nothing

warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)  # of XHTML, which is HTML too
PYTHON = "python"  # given instead of a path: the language reference that every Python contains
PART = 1 << 16  # number of bytes after which a text file is cut at the next blank line
_CHUNK = 1 << 20
LARGEST = 1 << 25  # bytes of a document; Beautiful Soup needs 45 times as much memory
_END = r"(?>\r*\n|\r)"  # of a line, on any system; a \r\n is one
_SPACES = "[ \t\f\v\xa0\u3000]*"  # characters, not escapes, so that a pattern can be encoded too
_BLANK = re.compile(rf"\n{_SPACES}\n")  # where all ends are \n
_BLANK_IN_FILES = f"{_END}{_SPACES}{_END}".encode()
# What files may contain, and where their documents are cut: where a pattern matches after a number
# of bytes, or at a line's or a word's end after another number of bytes without a match.
FORMS = {
    "text": ("text with blank lines between paragraphs", _BLANK_IN_FILES, PART, _CHUNK),
    "bert": (
        "BERT's format, a sentence a line and a blank line after a document",
        _BLANK_IN_FILES,
        0,
        _CHUNK,
    ),
    "html": ("HTML", rb"(?!)", 0, LARGEST),
    "doc": ("WikiExtractor's <doc>", rb"</doc>\s*", 0, LARGEST),
    "jsonl": ("JSON, an object with a text a line", rb"\n", 0, LARGEST),
    "parquet": ("Parquet with a column of texts", rb"\n", 0, LARGEST),  # its rows become JSON
    # what comes before the first title is so short that no document is cut there
    "wikitext": (
        "WikiText, = titles = between articles",
        rf"{_END}(?= = [^=\r\n]+ = {_END})".encode(),
        64,
        LARGEST,
    ),
}
_BY_SUFFIX = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".pod", ".dict"), "text"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_COMPRESSED: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".dz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
}  # fmt: skip
# what files begin with, whatever their names are
_SIGNS = {
    "zip": rb"PK\x03\x04",
    "dump": rb"(<\?xml[^>]*>\s*)?<mediawiki",
    "parquet": rb"PAR1",
    "doc": rb"<doc ",
    "jsonl": rb'\{[^\n]*"text"\s*:',
    "wikitext": rf"= [^=\r\n]+ = {_END}".encode(),
    "html": rb"(?i)(<\?xml[^>]*>\s*)?<(!doctype\s+)?html\b",
}
_SENTENCE_END = re.compile(r"[.!?…:;。！？．।॥۔؟።།]['\"”’»)\]]*\s*$")
_HUB_NAME = re.compile(r"([\w.-]+)/[\w.-]+(:[\w.-]+)?")
LEAST_WORDS = 5  # a paragraph with fewer is assumed to be a caption, a heading or an item of a list
_PROSE = ("p", "dd")  # `dd`: descriptions in definition lists are often prose
_NO_PROSE = ("script", "style", "nav", "header", "footer", "table", "pre", "form", "figure")
_DOC = re.compile(r'\A\s*<doc id="(.*?)"[^\n]* title="([^\n]*)">\n(.*)</doc>\s*\Z', re.DOTALL)
# Thai, Lao, Tibetan, Burmese, Khmer, Chinese and Japanese have no spaces between words.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff\U00020000-\U0003ffff]"
)
# characters of scripts other than Latin, Greek and Cyrillic, also as JSON may write them
_OTHERS = re.compile(
    "[\u0590-\u1cff\u2e80-\ud7ff\uf900-\ufdff\U00020000-\U0003ffff]"
    r"|\\u(?:0[6-9a-f]|1[0-9a-c]|[3-9a-d])"
)
_FULL_STOP = re.compile("[.!?。！？]")
FEATURES = datasets.Features({
    "text": datasets.Value("large_string"),  # a sentence a line
    "fault": datasets.Value("string"),  # why it cannot be read
    "size": datasets.Value("int64"),  # in bytes of the source
    "characters": datasets.Value("int64"),
    "others": datasets.Value("int64"),  # characters of `_OTHERS` in the source
    "draw": datasets.Value("float64"),  # of [0, 1): decides what a document with prose is used for
})  # fmt: skip


def find_sources(given: Sequence[str], form: str | None, left: LeftOut) -> list[dict[str, Any]]:
    """Find the given files and those in given folders, all of `form` if given; count the rest."""
    require(bool(given), "no source: name text files or folders, a data set of the hub, or python")
    sources: dict[str, dict[str, Any]] = {}
    # not resolved, because the name of a link says what kind of file it is
    tops = [Path(os.path.normpath(Path(place).absolute())) for place in given]
    # as many parts of the given paths belong to the names as tell them apart
    depth = next(n for n in count(1) if len({top.parts[-n:] for top in tops}) == len({*tops}))
    for place, top in zip(given, tops, strict=True):
        if place == PYTHON or _is_of_the_hub(place):
            of_place = {
                place: {"path": place, "name": place, "form": {PYTHON: PYTHON}.get(place, "hub")}
            }
        else:
            require(top.exists(), f"{place} does not exist: name a text file or a folder of files")
            files = {str(top): _form_of(top, form, named=True)}
            if top.is_dir():
                files = files_in(top, left, lambda here, name: _form_of(Path(here, name), form))
            of_place = {
                path: _source(Path(path), files[path], len(top.parts) - depth)
                for path in sorted(files, key=Path)
                if files[path]
            }
        require(
            bool(of_place),
            f"{place} is and holds no file of a known kind: give names that end in "
            f"{', '.join(_BY_SUFFIX)} (perhaps with {', '.join(_COMPRESSED)}), JSON lines or <doc> "
            f"elements, or say with --format what it is ({', '.join(FORMS)})",
        )
        for path, source in of_place.items():
            other = sources.setdefault(os.path.realpath(path), source)
            require(
                other is source,
                f"{path} is given twice, the first time as {other['path']}: leave one out",
            )
    return list(sources.values())


def _source(path: Path, form: str | None, above: int) -> dict[str, Any]:
    """Describe a file; the parts of its path that are `above` do not belong to its name."""
    name = str(Path(*path.parts[max(0, above) :])).encode("utf-8", "backslashreplace").decode()
    stat = path.stat()
    # A file that has changed is recognised by its size and its time.
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


def _form_of(path: Path, chosen: str | None, *, named: bool = False) -> str | None:
    """Find the form of a file from what it contains, or None if it is of no known kind."""
    # A file that the user has not named is only opened if its name may be that of a text.
    refuse_a_link_to_nothing(path, "text")
    if not path.is_file() or not (
        named or _suffix(path) in {*_BY_SUFFIX, "", ".json", ".xml", ".tokens", ".raw"}
    ):
        return None
    begin = b""
    with suppress(Exception):  # of a damaged file reading tells
        begin = next(_chunks("", str(path)))[:PART].removeprefix(b"\xef\xbb\xbf").lstrip()
    signs = (form for form, sign in _SIGNS.items() if re.match(sign, begin))
    form = next(signs, _BY_SUFFIX.get(_suffix(path)))
    require(
        form != "dump",
        f"{path} is a raw dump of a wiki: give cleaned articles, best those of wikimedia/wikipedia "
        "(a folder of its Parquet files or, for English, wikimedia/wikipedia:20231101.en), or "
        f"extract them: pip install wikiextractor; wikiextractor {path.name} --json -o extracted",
    )
    require(form != "zip", f"{path} is an archive of files: unpack it, and give its folder")
    is_of_bert = form == "text" and _is_of_bert(begin.decode(errors="replace"))
    return chosen if chosen and (named or form) else "bert" if is_of_bert else form


def _is_of_bert(text: str) -> bool:
    """Return whether most blocks have two or more lines, 90 % of which end a sentence."""
    parts = filter(None, map(str.strip, _BLANK.split(_with_ends_of_unix(text))))
    blocks = [part.split("\n") for part in parts]
    several = [block for block in blocks if len(block) > 1]
    ends = [_SENTENCE_END.search(line) is not None for line in chain.from_iterable(several)]
    # a list of sentences without any blank line says nothing of documents
    return 2 * len(several) > len(blocks) > 1 and sum(ends) >= 0.9 * len(ends)


def _with_ends_of_unix(text: str) -> str:
    return re.sub(_END, "\n", text) if "\r" in text else text


def documents(
    sources: list[dict[str, Any]], language: str, seed: int, any_script: bool
) -> Iterator[dict[str, Any]]:
    """Read the documents of sources, as rows of `FEATURES`."""
    for source in sources:
        try:
            for name, offset, data in pieces(source):
                yield _read(source["form"], name, offset, data, language, seed, any_script)
        except Exception as error:  # each kind of file has errors of its own
            require(
                source["form"] != "hub",
                f"{source['path']} is no file here, and cannot be had from the hub "
                f"({first_line(error)}): give a folder of its files, or try where there is a "
                "network",
            )
            yield dict.fromkeys(FEATURES) | {
                "fault": f"{source['name']}: it cannot be read, or its data end or are damaged "
                f"from here on ({error})",
                "size": 0,
            }


def pieces(source: dict[str, Any]) -> Iterator[tuple[str, int, bytes]]:
    """Cut a source at the ends of its documents: their names, places in the file, and bytes."""
    _, pattern, least, longest = FORMS.get(source["form"], FORMS["jsonl"])
    end, rest, name, offset, number = re.compile(pattern), bytearray(), source["name"], 0, 0
    for chunk in _chunks(source["form"], source["path"]):
        rest += chunk
        while len(rest) > least and ((match := end.search(rest, least)) or len(rest) >= longest):
            cut = (
                match.end()
                if match
                else rest.rfind(b"\n", 0, PART) + 1 or rest.rfind(b" ", 0, PART) + 1 or PART
            )
            number += 1
            yield f"{name}#{number}", offset, bytes(rest[:cut])
            del rest[:cut]
            offset += cut
    if rest.strip() or not number:
        yield f"{name}#{number + 1}" if number else name, offset, bytes(rest)


def _chunks(form: str, path: str) -> Iterator[bytes]:
    """Read a file, uncompressed; rows of tables as JSON lines."""
    if rows := _ROWS.get(form):
        yield from (json.dumps(row, default=_plain).encode() + b"\n" for row in rows(path))
    else:
        with _COMPRESSED.get(Path(path).suffix.lower(), open)(path, "rb") as file:
            yield from iter(lambda: file.read1(_CHUNK), b"")


def _plain(value: Any) -> Any:
    """Return a value of a table for JSON; many texts are stored as bytes."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"bytes that are not UTF-8": len(value)}  # so it is not taken for a text


def _of_the_hub(place: str) -> Iterator[dict[str, Any]]:
    # without a network it does not try again and again
    HfApi().dataset_info(place.partition(":")[0], timeout=10)
    yield from datasets.load_dataset(*place.split(":"), split="train", streaming=True)


def _of_python(_: str) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        # many paragraphs are in several topics
        paragraphs = [
            paragraph
            for paragraph in _prose(_BLANK.split(text), any_script=False)
            if paragraph not in seen
        ]
        seen.update(paragraphs)
        yield {"title": f"{PYTHON}:{topic}", "text": "\n\n".join(paragraphs)}


_ROWS: dict[str, Callable[[str], Iterable[dict[str, Any]]]] = {
    "parquet": lambda path: chain.from_iterable(
        batch.to_pylist() for batch in pq.ParquetFile(path).iter_batches(256)
    ),
    "hub": _of_the_hub,
    PYTHON: _of_python,
}


def _read(
    form: str, name: str, offset: int, data: bytes, language: str, seed: int, any_script: bool
) -> dict[str, Any]:
    """Read a document; what cannot be read has a fault, and what has no prose no text."""
    raw, identity, text, fault = "", name, "", None
    try:
        # bytes of zero, of which UTF-16 is full, are refused as other bytes that are not UTF-8
        raw = data.replace(b"\0", b"\xff").decode()
        content = _with_ends_of_unix(raw.removeprefix("\ufeff"))
        identity, blocks = _READERS.get(form, _of_row)(name, content)
        divided = (
            segment(language, paragraph) for paragraph in _prose(blocks, any_script=any_script)
        )
        lines = blocks if form == "bert" else chain.from_iterable(divided)
        text = "\n".join(filter(None, map(str.strip, lines)))
    except UnicodeDecodeError as error:
        fault = (
            f"{name}, byte {offset + error.start} of its file: it is not UTF-8, {len(data)} bytes "
            "left out: convert it with iconv -t utf-8"
        )
    except Exception as error:  # the parsers may raise any exception for unexpected input
        fault = f"{name}: {first_line(error)}"
    digest = hashlib.blake2b(f"{seed}\n{identity}".encode(errors="backslashreplace"), digest_size=8)
    return {
        "text": text,
        "fault": fault,
        "size": len(data),
        "characters": len(text),
        "others": len(_OTHERS.findall(raw)),
        "draw": int(digest.hexdigest(), 16) / 2.0**64 if text else None,
    }


def _prose(blocks: Iterable[str], *, any_script: bool) -> list[str]:
    """Return the paragraphs of text, without those of fewer than five words."""
    # With `any_script`, two characters of a script without spaces count as a word, and what has
    # neither spaces between words nor full stops is divided at its line ends.
    if any_script:
        blocks = chain.from_iterable(
            block.split("\n")
            if _UNSPACED.search(block) and not _FULL_STOP.search(block)
            else [block]
            for block in blocks
        )
    return [
        " ".join(words)
        for words in map(str.split, blocks)
        if len(words) >= LEAST_WORDS
        or (any_script and len(_UNSPACED.findall("".join(words))) >= 2 * LEAST_WORDS)
    ]


def _of_html(name: str, markup: str) -> tuple[str, list[str]]:
    """Read the paragraphs; tables, preformatted text and navigation are left out."""
    soup = BeautifulSoup(markup, "html.parser")
    for tag in soup(_NO_PROSE):
        tag.decompose()
    # Only the innermost elements are taken, because an outer one repeats their text.
    return name, [
        tag.get_text().replace("¶", "") for tag in soup(_PROSE) if tag.find(_PROSE) is None
    ]


def _of_element(name: str, text: str) -> tuple[str, list[str]]:
    """Read a <doc> element of WikiExtractor, whose first line is the title; a line a paragraph."""
    elements = _DOC.findall(text)
    require(bool(elements) and "\n<doc " not in elements[0][2], "it is no whole <doc> element")
    number, title, body = elements[0]
    return f"{title} {number}", unescape(body.removeprefix(f"{title}\n")).split("\n")


def _of_row(name: str, text: str) -> tuple[str, list[str]]:
    """Read a row of a table; its title and id identify it if it has them."""
    row = json.loads(text) if text.strip() else {"text": ""}
    require(
        isinstance(row, dict) and "text" in row,
        f"it is no object with a text, but has {', '.join(row) if isinstance(row, dict) else row}",
    )
    require(
        isinstance(row["text"], str | None),
        f"its text is {json.dumps(row['text'])[:60]}: give text in UTF-8",
    )
    # WikiExtractor's rows, which have this key, escape characters as in HTML
    body = unescape(row["text"] or "") if "revid" in row else row["text"] or ""
    body = _with_ends_of_unix(body)
    identity = " ".join(str(row[key]) for key in ("title", "id") if row.get(key))
    # the paragraphs of published articles are lines if there are no blank ones
    return identity or name, _BLANK.split(body) if _BLANK.search(body) else body.split("\n")


_READERS: dict[str, Callable[[str, str], tuple[str, list[str]]]] = {
    "text": lambda name, text: (name, _BLANK.split(text)),
    "bert": lambda name, text: (name, text.split("\n")),
    "html": _of_html,
    "doc": _of_element,
    "wikitext": lambda name, text: (
        name,
        [line for line in text.split("\n") if not line.startswith(" = ")],
    ),
}
