"""Pieces of source files, read as documents: a name and paragraphs of plain text without line breaks."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch_thor.training.text.wikipedia import Document, article
from torch_thor.training.text.wikitext import LEAST_WORDS

LARGEST_HTML = 1 << 25  # bytes; Beautiful Soup needs about 45 times as much memory
_SPACE = re.compile(r"\s+")
# bytes that are not UTF-8, as `surrogateescape` decodes them, and what UTF-16 is full of
_NOT_UTF8 = re.compile("[\0\udc80-\udcff]")
_PROSE = ("p", "dd")  # `dd`: descriptions in definition lists are often prose
_NO_PROSE = ("script", "style", "nav", "header", "footer", "table", "pre", "form", "figure")


class Piece(NamedTuple):
    """A part of a source file that is one document.

    Args:
        kind: `page` (of a Wikipedia dump), `html` or `text`.
        source: The name of the source file.
        name: The name of the document; that of a page is its title.
        offset: The position in the uncompressed file, in bytes.
        data: The bytes.
    """

    kind: str
    source: str
    name: str
    offset: int
    data: bytes


def fault(source: str, offset: int, reason: str) -> str:
    """Describe a part of a source that could not be read."""
    return f"{source}, byte {offset} of its uncompressed contents: {reason}"


def read(piece: Piece) -> Iterator[Document | str]:
    """Read a piece; yields a document if it has prose, and a description of each fault."""
    if piece.kind == "page":
        try:
            document = article(piece.data)
        except Exception as error:  # the parsers may raise any exception for unexpected input
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            yield fault(piece.source, piece.offset, f"a page cannot be parsed ({line})")
        else:
            if document is not None:
                yield document
        return
    whole = piece.data.decode("utf-8", "surrogateescape")
    text, bad, damaged = whole.removeprefix("\ufeff"), _NOT_UTF8.search(whole), 0
    if piece.kind == "html":
        if len(piece.data) > LARGEST_HTML:
            size = f"more than {LARGEST_HTML >> 20} MB"
            yield fault(piece.source, 0, f"it has {size}, too much for an HTML file: divide it, or convert it to text")
            return
        found = _html_paragraphs(text)
        paragraphs = [one for one in found if not _NOT_UTF8.search(one)]
        damaged = len(found) - len(paragraphs)
    elif bad is None:
        paragraphs = paragraphs_of(text)
    else:
        lines = [None if _NOT_UTF8.search(line) else line for line in text.split("\n")]
        damaged = lines.count(None)
        # what is before and after a damaged line is not one paragraph
        paragraphs = paragraphs_of("\n".join("\n" if line is None else line for line in lines))
    if bad is not None and damaged:
        offset = piece.offset + len(whole[: bad.start()].encode("utf-8", "surrogateescape"))
        what = f"{damaged} of its {'paragraphs' if piece.kind == 'html' else 'lines'} left out"
        yield fault(piece.source, offset, f"it is not UTF-8, {what}: convert it with iconv -t utf-8")
    if paragraphs:
        yield Document(piece.name, paragraphs)


def paragraphs_of(text: str) -> list[str]:
    """Divide plain text at blank lines into paragraphs; those with fewer than five words are left out."""
    return _prose(re.split(r"\n[ \t\r]*\n", text))


def _prose(paragraphs: list[str]) -> list[str]:
    found = (_SPACE.sub(" ", paragraph).strip() for paragraph in paragraphs)
    return [paragraph for paragraph in found if len(paragraph.split()) >= LEAST_WORDS]


def _html_paragraphs(markup: str) -> list[str]:
    """Return the text of the paragraphs; tables, preformatted text and navigation are left out."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(markup, "html.parser")
    for tag in soup(_NO_PROSE):
        tag.decompose()
    return _prose([tag.get_text().replace("¶", "") for tag in soup(_PROSE) if tag.find(_PROSE) is None])
