"""Source file pieces, read as documents: a name and plain-text paragraphs without line breaks."""

import re
from typing import NamedTuple
from xml.etree import ElementTree

from torch_thor.errors import first_line
from torch_thor.training.text.wikitext import LEAST_WORDS, clean

LARGEST_HTML = 1 << 25  # bytes; Beautiful Soup needs about 45 times as much memory
_SPACE = re.compile(r"\s+")
_PROSE = ("p", "dd")  # `dd`: descriptions in definition lists are often prose
_NO_PROSE = ("script", "style", "nav", "header", "footer", "table", "pre", "form", "figure")
# Templates of disambiguation pages of large Wikipedias. {{disambiguation needed}} marks a link in
# an ordinary article.
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:template:\s*)?(?:[\w ]+ )?"
    r"(?:disambiguation|disambig|disamb|dab|hndis|geodis|numberdis|begriffsklärung|homonymie|desambiguación|"
    r"desambiguação|disambigua|doorverwijspagina)\b(?!\s+needed)",
    re.IGNORECASE,
)
_REDIRECT = re.compile(r"^\s*#redirect\b", re.IGNORECASE)


class Document(NamedTuple):
    """A name, which is unique in its source, and paragraphs of plain text without line breaks."""

    name: str
    paragraphs: list[str]


class Piece(NamedTuple):
    """A part of a source file that is one document; the name of a page is its title."""

    kind: str  # page (of a Wikipedia dump), html or text
    source: str
    name: str
    offset: int  # in the uncompressed file
    data: bytes


def fault(source: str, offset: int, reason: str) -> str:
    """Describe a part of a source that could not be read."""
    return f"{source}, byte {offset} of its uncompressed contents: {reason}"


def read(piece: Piece) -> Document | str:
    """Read a piece; returns a document, whose paragraphs are prose, or a fault."""
    try:
        if piece.kind == "page":
            return _article(piece.data)
        if piece.kind == "html" and len(piece.data) > LARGEST_HTML:
            return fault(
                piece.source,
                0,
                f"more than {LARGEST_HTML >> 20} MB of HTML: divide it, or convert it to text",
            )
        text = piece.data.decode().removeprefix("\ufeff")
        if "\0" in text:  # of which UTF-16 is full
            raise UnicodeDecodeError(
                "utf-8", piece.data, piece.data.index(b"\0"), len(piece.data), "it has zero bytes"
            )
        return Document(
            piece.name, _html_paragraphs(text) if piece.kind == "html" else paragraphs_of(text)
        )
    except UnicodeDecodeError as error:
        what = f"it is not UTF-8, {len(piece.data)} bytes left out: convert it with iconv -t utf-8"
        return fault(piece.source, piece.offset + error.start, what)
    except Exception as error:  # the parsers may raise any exception for unexpected input
        reason = f"it cannot be parsed ({type(error).__name__}: {first_line(error)})"
        return fault(piece.source, piece.offset, reason)


def paragraphs_of(text: str) -> list[str]:
    """Divide plain text at blank lines into paragraphs, without those of fewer than five words."""
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
    return _prose(
        [tag.get_text().replace("¶", "") for tag in soup(_PROSE) if tag.find(_PROSE) is None]
    )


def _article(xml: bytes) -> Document:
    """Read a page; a redirect, a disambiguation page or a non-article has no paragraphs."""
    page = ElementTree.fromstring(xml)
    if page.find("ns") is None:
        raise ValueError("no <ns>: dumps have it since 2012")
    # dumps with the history have the revisions in the order of time
    latest = page.findall("revision")[-1]
    text = latest.findtext("text") or ""
    is_article = page.findtext("ns") == "0" and latest.findtext("model", "wikitext") == "wikitext"
    is_other = (
        page.find("redirect") is not None or _REDIRECT.match(text) or _DISAMBIGUATION.search(text)
    )
    return Document(
        page.findtext("title") or "", clean(text) if is_article and not is_other else []
    )
