"""Wikipedia dumps (`*-pages-articles*.xml.bz2`): division into pages, and parsing with mwxml.

The dump is read as a stream and divided at `<page>` and `</page>`. These tags cannot occur inside a page, because its
text is escaped. Line breaks in the dump are not needed. As a result, memory use does not depend on the size of the
dump, pages can be parsed by several processes in parallel, and a page that is not well-formed affects no other page.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch_thor.training.text.document import Document, Fault
from torch_thor.training.text.wikitext import clean

_BEGIN, _END, _CLOSE, _SITE = b"<page>", b"</page>", b"</mediawiki>", b"</siteinfo>"
# Replaces a damaged header. It defines no namespaces, so only the namespace number of a page marks it as an article.
_PLAIN_HEADER = b"<mediawiki><siteinfo><namespaces></namespaces></siteinfo>"
LARGEST_PAGE = 1 << 26  # bytes; the largest pages of Wikipedia have about 2 MB

# Templates of disambiguation pages of large Wikipedias. {{disambiguation needed}} marks a link in an ordinary article.
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:template:\s*)?(?:[\w ]+ )?"
    r"(?:disambiguation|disambig|disamb|dab|hndis|geodis|numberdis|begriffsklärung|homonymie|desambiguación|"
    r"desambiguação|disambigua|doorverwijspagina)\b(?!\s+needed)",
    re.IGNORECASE,
)
_REDIRECT = re.compile(r"^\s*#redirect\b", re.IGNORECASE)


@dataclass(frozen=True)
class RawPage:
    """The XML of one page of a dump.

    Args:
        offset: The offset of the page in the uncompressed dump, in bytes.
        xml: The bytes from `<page>` to `</page>`, including both tags.
    """

    offset: int
    xml: bytes


class PageCutter:
    """Divides the bytes of a dump into pages.

    Args:
        source: The name of the dump, which is used in faults.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.header: bytes | None = None  # the bytes before the first page: <mediawiki> and <siteinfo>
        self.faults: list[Fault] = []
        self._rest = bytearray()
        self._offset = 0  # offset in the dump of the first byte of `_rest`

    def feed(self, chunk: bytes) -> Iterator[RawPage]:
        """Process the next bytes of the dump.

        Args:
            chunk: The next bytes of the dump, of any length.

        Yields:
            The pages that end within these bytes.
        """
        rest = self._rest
        searched = max(0, len(rest) - len(_END))
        rest += chunk
        position = 0
        while (end := rest.find(_END, max(position, searched))) >= 0:
            end += len(_END)
            if self.header is None:
                site = rest.find(_SITE, position, end)
                self.header = _PLAIN_HEADER if site < 0 else bytes(rest[position : site + len(_SITE)])
                position = max(position, site)
            # use the last <page> before the </page>: a page without an end is lost, but the page after it is kept
            begin = rest.rfind(_BEGIN, position, end)
            if begin < 0:
                self._fault(position, "a page ends that has not begun")
            else:
                if rest.find(_BEGIN, position, end) != begin:
                    self._fault(position, "a page begins inside another one")
                yield RawPage(self._offset + begin, bytes(rest[begin:end]))
            position = end
        del rest[:position]
        self._offset += position
        if len(rest) > LARGEST_PAGE:
            self._fault(0, f"more than {LARGEST_PAGE >> 20} MB without the end of a page")
            self._offset += len(rest) - len(_BEGIN)
            del rest[: -len(_BEGIN)]

    def finish(self) -> None:
        """Process the end of the dump: record a fault if the dump is truncated."""
        if _BEGIN in self._rest:
            self._fault(self._rest.find(_BEGIN), "the dump ends inside a page")
        elif self.header is not None and _CLOSE not in self._rest:
            self._fault(len(self._rest), "the dump ends without </mediawiki>: it is cut short")

    def _fault(self, position: int, reason: str) -> None:
        self.faults.append(Fault(self.source, self._offset + position, reason))


def articles(source: str, header: bytes, pages: list[RawPage]) -> Iterator[Document | Fault]:
    """Parse pages and reduce the articles among them to paragraphs.

    Args:
        source: The name of the dump.
        header: The bytes before the first page of the dump.
        pages: Pages of the dump.

    Yields:
        A document for each article that has paragraphs, and a fault for each page that cannot be parsed. Redirects,
        disambiguation pages and pages of other namespaces are left out.
    """
    for page in pages:
        try:
            found = _article(header, page)
        except Exception as error:  # the parsers may raise any exception for unexpected input
            yield Fault(source, page.offset, f"a page cannot be parsed ({_one_line(error)})")
        else:
            if found is not None:
                yield found


def _article(header: bytes, page: RawPage) -> Document | None:
    import mwxml

    page.xml.decode("utf-8")  # raises if not UTF-8; expat would decode with any other encoding that the header declares
    latest = None
    for one in mwxml.Dump.from_file(io.BytesIO(header + page.xml + _CLOSE)):
        if one.namespace or one.redirect:
            return None
        for revision in one:  # dumps with the history of a page have its revisions in the order of time
            latest = revision
    if latest is None or latest.model not in (None, "wikitext"):
        return None
    text = latest.text or ""
    if _REDIRECT.match(text) or _DISAMBIGUATION.search(text):
        return None
    paragraphs = clean(text)
    return Document(str(latest.page.title), paragraphs) if paragraphs else None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
