"""The documents of source files: where each begins and ends, and its sentences of plain text.

Files are read as streams, so that memory use does not depend on their size. What cannot be read is
a document with a fault; those before it in the file are kept.
"""

import hashlib
import json
import pydoc_data.topics
import re
from collections.abc import Callable, Iterable, Iterator
from html import unescape
from itertools import chain
from typing import Any

import datasets
import pyarrow.parquet as pq
from bs4 import BeautifulSoup
from sentencex import segment

from torch_thor.errors import first_line, require
from torch_thor.training.text.sources import CHUNK, FORMS, HUB, PART, PYTHON, opened

LEAST_WORDS = 5  # a paragraph with fewer is assumed to be a caption, a heading or an item of a list
_BLANK = re.compile(r"\n[ \t\r]*\n")
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
                source["form"] != HUB,
                f"{source['path']} is no file here, and cannot be had from the hub "
                f"({first_line(error)}): give a folder of its files, or try where there is a "
                "network",
            )
            reason = f"it cannot be read, or its data end or are damaged from here on ({error})"
            yield dict.fromkeys(FEATURES) | {"fault": f"{source['name']}: {reason}", "size": 0}


def pieces(source: dict[str, Any]) -> Iterator[tuple[str, int, bytes]]:
    """Cut a source at the ends of its documents: their names, places in the file, and bytes."""
    _, pattern, least, longest = FORMS.get(source["form"], FORMS["jsonl"])
    end, rest, name, offset, number = re.compile(pattern), bytearray(), source["name"], 0, 0
    for chunk in _chunks(source):
        rest += chunk
        while len(rest) > least and ((found := end.search(rest, least)) or len(rest) >= longest):
            cut = (
                found.end()
                if found
                else rest.rfind(b"\n", 0, PART) + 1 or rest.rfind(b" ", 0, PART) + 1 or PART
            )
            number += 1
            yield f"{name}#{number}", offset, bytes(rest[:cut])
            del rest[:cut]
            offset += cut
    if rest.strip() or not number:
        yield f"{name}#{number + 1}" if number else name, offset, bytes(rest)


def _chunks(source: dict[str, Any]) -> Iterator[bytes]:
    """Read a file, uncompressed; rows of tables as JSON lines."""
    if rows := _ROWS.get(source["form"]):
        for row in rows(source["path"]):
            yield json.dumps(row, default=str).encode() + b"\n"
    else:
        with opened(source["path"]) as file:
            yield from iter(lambda: file.read1(CHUNK), b"")


def _of_parquet(path: str) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(256):
            yield from batch.to_pylist()


def _of_python(_: str) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        # many paragraphs are in several topics
        found = [one for one in _prose(_BLANK.split(text), any_script=False) if one not in seen]
        seen.update(found)
        yield {"title": f"{PYTHON}:{topic}", "text": "\n\n".join(found)}


_ROWS: dict[str, Callable[[str], Iterable[dict[str, Any]]]] = {
    "parquet": _of_parquet,
    HUB: lambda place: datasets.load_dataset(*place.split(":"), split="train", streaming=True),
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
        identity, blocks = _READERS.get(form, _of_row)(name, raw.removeprefix("\ufeff"))
        divided = (segment(language, one) for one in _prose(blocks, any_script=any_script))
        lines = blocks if form == "bert" else chain.from_iterable(divided)
        text = "\n".join(filter(None, map(str.strip, lines)))
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8, {len(data)} bytes left out: convert it with iconv -t utf-8"
        fault = f"{name}, byte {offset + error.start} of its file: {reason}"
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
    # the innermost ones
    return name, [
        tag.get_text().replace("¶", "") for tag in soup(_PROSE) if tag.find(_PROSE) is None
    ]


def _of_element(name: str, text: str) -> tuple[str, list[str]]:
    """Read a <doc> element of WikiExtractor, whose first line is the title; a line a paragraph."""
    found = _DOC.findall(text)
    require(bool(found) and "\n<doc " not in found[0][2], "it is no whole <doc> element")
    number, title, body = found[0]
    return f"{title} {number}", unescape(body.removeprefix(f"{title}\n")).split("\n")


def _of_row(name: str, text: str) -> tuple[str, list[str]]:
    """Read a row of a table; its title and id identify it if it has them."""
    row = json.loads(text) if text.strip() else {"text": ""}
    require(
        isinstance(row, dict) and isinstance(row.get("text", 0), str | None),
        f"it is no object with a text, but has {', '.join(row) if isinstance(row, dict) else row}",
    )
    # WikiExtractor's rows, which have this key, escape characters as in HTML
    body = unescape(row["text"] or "") if "revid" in row else row["text"] or ""
    own = " ".join(str(row[key]) for key in ("title", "id") if row.get(key))
    # the paragraphs of published articles are lines if there are no blank ones
    return own or name, _BLANK.split(body) if _BLANK.search(body) else body.split("\n")


_READERS: dict[str, Callable[[str, str], tuple[str, list[str]]]] = {
    "text": lambda name, text: (name, _BLANK.split(text)),
    "bert": lambda name, text: (name, text.split("\n")),
    "html": _of_html,
    "doc": _of_element,
}
