"""A piece of a source, read as a document: what identifies it, and sentences of plain text."""

import json
import re
from collections.abc import Callable, Iterable
from html import unescape
from itertools import chain
from typing import Any

from bs4 import BeautifulSoup
from sentencex import segment

from torch_thor.errors import first_line

FAULT = "fault"  # the form of a piece that tells what cannot be read
LEAST_WORDS = 5  # a paragraph with fewer is assumed to be a caption, a heading or an item of a list
_SPACE, _BLANK = re.compile(r"\s+"), re.compile(r"\n[ \t\r]*\n")
_PROSE = ("p", "dd")  # `dd`: descriptions in definition lists are often prose
_NO_PROSE = ("script", "style", "nav", "header", "footer", "table", "pre", "form", "figure")
_DOC = re.compile(r'\s*<doc id="(.*?)"[^\n]* title="([^\n]*)">\n(.*)</doc>\s*', re.DOTALL)
# Thai, Lao, Tibetan, Burmese, Khmer, Chinese and Japanese have no spaces between words.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff\U00020000-\U0003ffff]"
)
_FULL_STOP = re.compile("[.!?。！？]")


def read_document(piece: dict[str, Any], language: str, any_script: bool) -> dict[str, Any]:
    """Read a piece; what cannot be read has a fault, and what has no prose no sentences."""
    form, name, data = piece["form"], piece["name"], piece["data"]
    identity, paragraphs, fault = name, list[str](), None
    try:
        if form == FAULT:
            raise ValueError(data.decode())
        identity, paragraphs = _READERS[form](name, _decoded(data), any_script)
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8, {len(data)} bytes left out: convert it with iconv -t utf-8"
        fault = f"{name}, byte {piece['offset'] + error.start} of its file: {reason}"
    except Exception as error:  # the parsers may raise any exception for unexpected input
        fault = f"{name}: {first_line(error)}"
    parts = paragraphs if form == "bert" else chain(*(segment(language, one) for one in paragraphs))
    sentences = [text for part in parts if (text := part.strip())]
    found = {"name": identity, "sentences": sentences, "fault": fault}
    return found | {"characters": sum(map(len, sentences))}


def _decoded(data: bytes) -> str:
    text = data.decode().removeprefix("\ufeff")
    if "\0" in text:  # of which UTF-16 is full
        at = data.index(b"\0")
        raise UnicodeDecodeError("utf-8", data, at, len(data), "it has zero bytes")
    return text


def paragraphs_of(text: str, *, any_script: bool = False) -> list[str]:
    """Divide plain text at blank lines into paragraphs, without those of fewer than five words."""
    # With `any_script`, two characters of a script without spaces count as a word, and what has
    # neither spaces between words nor full stops is divided at its line ends.
    blocks = _BLANK.split(text)
    if any_script:
        blocks = [line for block in blocks for line in _lines(block)]
    return _prose(blocks, any_script=any_script)


def _lines(block: str) -> list[str]:
    divided = _UNSPACED.search(block) and not _FULL_STOP.search(block)
    return block.split("\n") if divided else [block]


def _prose(paragraphs: Iterable[str], *, any_script: bool) -> list[str]:
    found = (_SPACE.sub(" ", paragraph).strip() for paragraph in paragraphs)
    return [
        paragraph
        for paragraph in found
        if len(paragraph.split()) >= LEAST_WORDS
        or (any_script and len(_UNSPACED.findall(paragraph)) >= 2 * LEAST_WORDS)
    ]


def _of_html(name: str, markup: str, any_script: bool) -> tuple[str, list[str]]:
    """Read the paragraphs; tables, preformatted text and navigation are left out."""
    soup = BeautifulSoup(markup, "html.parser")
    for tag in soup(_NO_PROSE):
        tag.decompose()
    innermost = [tag for tag in soup(_PROSE) if tag.find(_PROSE) is None]
    texts = (tag.get_text().replace("¶", "") for tag in innermost)
    return name, _prose(texts, any_script=any_script)


def _of_element(name: str, text: str, any_script: bool) -> tuple[str, list[str]]:
    """Read a <doc> element of WikiExtractor, whose first line is the title; a line a paragraph."""
    found = _DOC.fullmatch(text)
    if found is None or "\n<doc " in found[3]:
        raise ValueError("it is no whole <doc> element")
    number, title, body = found.groups()
    lines = unescape(body.removeprefix(f"{title}\n")).replace("\n", "\n\n")
    return f"{title} {number}", paragraphs_of(lines, any_script=any_script)


def _of_row(name: str, text: str, any_script: bool) -> tuple[str, list[str]]:
    """Read a row of a table; its title and id identify it if it has them."""
    row = json.loads(text) if text.strip() else {"text": ""}
    if not isinstance(row, dict) or not isinstance(row.get("text", 0), str | None):
        raise ValueError(f"it is no object with a text, but has {', '.join(row)}")
    body = row["text"] or ""
    own = " ".join(str(row[key]) for key in ("title", "id") if row.get(key))
    # WikiExtractor's rows, which have this key, escape characters as in HTML
    body = unescape(body) if "revid" in row else body
    # the paragraphs of published articles are lines if there are no blank ones
    body = body if _BLANK.search(body) else body.replace("\n", "\n\n")
    return own or name, paragraphs_of(body, any_script=any_script)


_READERS: dict[str, Callable[[str, str, bool], tuple[str, list[str]]]] = {
    "text": lambda name, text, any_script: (name, paragraphs_of(text, any_script=any_script)),
    "bert": lambda name, text, _: (name, text.split("\n")),
    "html": _of_html,
    "doc": _of_element,
    "jsonl": _of_row,
}
