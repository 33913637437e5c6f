"""Wikipedia dumps (`*-pages-articles*.xml.bz2`): the pages, and the articles among them as paragraphs of plain text.

A dump is cut at `<page>` and `</page>`, which cannot occur inside a page because its text is escaped. Memory use
therefore does not depend on the size of the dump, pages are parsed by several processes, and a page that is not
well-formed affects no other page.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree

from torch_thor.training.text.wikitext import clean

_BEGIN, _END = b"<page>", b"</page>"
LARGEST_PAGE = 1 << 26  # bytes; the largest pages of Wikipedia have about 2 MB

# Templates of disambiguation pages of large Wikipedias. {{disambiguation needed}} marks a link in an ordinary article.
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


def pages(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes | str]]:
    """Cut a dump; yields the offset of each page with its XML, and of each fault with its reason."""
    rest, offset, found = bytearray(), 0, False  # offset: that of the first byte of `rest` in the dump
    for chunk in chunks:
        searched, position = max(0, len(rest) - len(_END)), 0
        rest += chunk
        while (end := rest.find(_END, max(position, searched))) >= 0:
            # from the last <page> on: of a page without an end, the page after it is kept
            begin, number = rest.rfind(_BEGIN, position, end), rest.count(_BEGIN, position, end)
            if number != 1:
                yield offset + position, f"{number} times {_BEGIN.decode()} before {_END.decode()}"
            position, found = end + len(_END), True
            if number:
                yield offset + begin, bytes(rest[begin:position])
        if len(rest) - position > LARGEST_PAGE:
            yield offset + position, f"more than {LARGEST_PAGE >> 20} MB without the end of a page"
            position = len(rest) - len(_BEGIN)
        del rest[:position]
        offset += position
    if not found:
        yield 0, "it has no whole <page>: is it a Wikipedia dump?"
    elif b"</mediawiki>" not in rest:
        yield offset, "the dump ends without </mediawiki>: it is cut short"


def article(xml: bytes) -> Document | None:
    """Read a page.

    Args:
        xml: The bytes from `<page>` to `</page>`, in UTF-8.

    Returns:
        The document; None for a redirect, a disambiguation page, or a page that is no article or has no prose.

    Raises:
        ValueError: If the page is of an old dump. If it cannot be parsed, the error may have any type.
    """
    page = ElementTree.fromstring(xml)
    namespace = page.findtext("ns")
    if namespace is None:
        raise ValueError("no <ns>: dumps have it since 2012")
    if namespace != "0" or page.find("redirect") is not None:
        return None
    latest = page.findall("revision")[-1]  # dumps with the history have the revisions in the order of time
    text = latest.findtext("text") or ""
    if latest.findtext("model", "wikitext") != "wikitext" or _REDIRECT.match(text) or _DISAMBIGUATION.search(text):
        return None
    paragraphs = clean(text)
    return Document(page.findtext("title") or "", paragraphs) if paragraphs else None
