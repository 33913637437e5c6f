"""Wikipedia dumps (`*-pages-articles*.xml.bz2`): cut into pages as a stream, parsed with mwxml, cleaned to paragraphs.

The dump is cut at `<page>` and `</page>`, which cannot occur inside a page (its text is escaped), whether or not it has
line breaks. So memory does not depend on the size of the dump, pages are parsed in many processes at once, and a page
that is not well-formed costs only itself.
"""

import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_thor.training.text.document import Document, Fault

_BEGIN, _END, _CLOSE, _SITE = b"<page>", b"</page>", b"</mediawiki>", b"</siteinfo>"
# What stands in the place of a header that is damaged: article is then every page outside of all namespaces.
_PLAIN_HEADER = b"<mediawiki><siteinfo><namespaces></namespaces></siteinfo>"
LARGEST_PAGE = 1 << 26  # bytes; the largest pages of Wikipedia have 2 MB

# Tags whose contents are no prose.
_NO_PROSE = {
    "ref", "references", "gallery", "math", "chem", "timeline", "syntaxhighlight", "source", "score", "pre", "code",
    "table", "imagemap", "graph", "templatestyles", "hiero", "ce", "mapframe", "maplink", "categorytree", "inputbox",
}  # fmt: skip
_LIST_ITEMS = {"li", "dt", "dd"}
# Links whose target begins so name files, categories and pages of other wikis, not articles.
_PREFIXED = re.compile(r"^\s*:?[^\s:|\[\]][^:|\[\]]*:\S")
_DISAMBIGUATION = re.compile(r"\{\{\s*(?:[\w ]+ )?(?:disambiguation|disambig|dab|hndis|geodis)\b", re.IGNORECASE)
_REDIRECT = re.compile(r"^\s*#redirect\b", re.IGNORECASE)
_SPACE = re.compile(r"\s+")
_EMPTY_BRACKETS = re.compile(r"\s*\(\s*[,;]*\s*\)")
_BEFORE_POINT = re.compile(r"\s+([,.;:!?])")
_LEAST_WORDS = 5  # a line with fewer is a caption, a label or what a template has left


@dataclass(frozen=True)
class RawPage:
    """One page as it stands in a dump.

    Args:
        offset: Bytes from the beginning of the uncompressed dump.
        xml: From `<page>` to `</page>`.
    """

    offset: int
    xml: bytes


class PageCutter:
    """Cuts the bytes of a dump into pages.

    Args:
        source: The dump's name, for faults.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.header: bytes | None = None  # what stands before the first page: <mediawiki> and <siteinfo>
        self.faults: list[Fault] = []
        self._rest = bytearray()
        self._offset = 0  # of the first byte of the rest

    def feed(self, chunk: bytes) -> Iterator[RawPage]:
        """Take the next bytes.

        Args:
            chunk: Bytes of the dump, of any length.

        Yields:
            The pages that end in them.
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
            # the last begin before the end: a page that never ended is lost, and the one after it is not
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
        """Take note that there are no more bytes."""
        if _BEGIN in self._rest:
            self._fault(self._rest.find(_BEGIN), "the dump ends inside a page")
        elif self.header is not None and _CLOSE not in self._rest:
            self._fault(len(self._rest), "the dump ends without </mediawiki>: it is cut short")

    def _fault(self, position: int, reason: str) -> None:
        self.faults.append(Fault(self.source, self._offset + position, reason))


def articles(source: str, header: bytes, pages: list[RawPage]) -> Iterator[Document | Fault]:
    """Parse pages, and clean those that are articles.

    Args:
        source: The dump's name.
        header: What stands before its first page.
        pages: Pages of it.

    Yields:
        A document for each article that has paragraphs; nothing for redirects, disambiguation pages and pages of other
        namespaces; a fault for each page that cannot be read.
    """
    for page in pages:
        try:
            found = _article(header, page)
        except Exception as error:  # whatever a parser says of what it does not expect
            yield Fault(source, page.offset, f"a page cannot be parsed ({_one_line(error)})")
        else:
            if found is not None:
                yield found


def _article(header: bytes, page: RawPage) -> Document | None:
    import mwxml

    page.xml.decode("utf-8")  # expat reads bytes that are no UTF-8 as other characters where the header says so
    for one in mwxml.Dump.from_file(io.BytesIO(header + page.xml + _CLOSE)):
        if one.namespace or one.redirect:
            return None
        for revision in one:
            text = revision.text or ""
            if _REDIRECT.match(text) or _DISAMBIGUATION.search(text) or revision.model not in (None, "wikitext"):
                return None
            paragraphs = clean(text)
            return Document(str(one.title), paragraphs) if paragraphs else None
    return None


def clean(wikitext: str) -> tuple[str, ...]:
    """Reduce wikitext to its paragraphs.

    Templates, tables, references, headings, lists, pictures, categories, formulas and comments are left out; links are
    replaced by their text.

    Args:
        wikitext: The text of a page.

    Returns:
        Its paragraphs, plain text without line breaks.
    """
    from mwparserfromhell.parser import Parser
    from mwparserfromhell.parser.builder import Builder

    pieces: list[str] = []
    parser, builder = Parser(), Builder()  # type: ignore[no-untyped-call]
    tokens = parser._tokenizer.tokenize(wikitext)
    _collect(builder.build(_without_markup(tokens)).nodes, pieces)  # type: ignore[no-untyped-call]
    found = []
    for line in "".join(pieces).split("\n"):
        text = _SPACE.sub(" ", line.replace("\x00", "")).strip()
        text = _BEFORE_POINT.sub(r"\1", _EMPTY_BRACKETS.sub("", text))
        if "\x01" not in text and len(text.split()) >= _LEAST_WORDS:
            found.append(text)
    return tuple(found)


def _without_markup(tokens: list[Any]) -> list[Any]:
    """Drop templates, comments, headings and tags without prose: building their nodes is most of the parser's time."""
    from mwparserfromhell.parser import tokens as kinds

    dropped = {kinds.TemplateOpen, kinds.ArgumentOpen, kinds.CommentStart, kinds.HeadingStart}
    begins = {*dropped, kinds.TagOpenOpen}
    ends = {
        kinds.TemplateClose, kinds.ArgumentClose, kinds.CommentEnd, kinds.HeadingEnd, kinds.TagCloseClose,
        kinds.TagCloseSelfclose,
    }  # fmt: skip
    kept, depth = [], 0  # depth: how many spans of tokens have begun since the first one that is dropped
    for token, following in itertools.pairwise([*tokens, None]):
        kind = type(token)
        if depth:
            depth += (kind in begins) - (kind in ends)
        elif kind in dropped or (kind is kinds.TagOpenOpen and str(following.text).strip().lower() in _NO_PROSE):
            depth = 1
        else:
            kept.append(token)
    return kept


def _collect(nodes: Any, pieces: list[str]) -> None:
    """Add the plain text of nodes; a line with a list item gets the character 1."""
    from mwparserfromhell.nodes import ExternalLink, HTMLEntity, Tag, Text, Wikilink

    for node in nodes:
        if isinstance(node, Text):
            pieces.append(str(node.value))
        elif isinstance(node, Wikilink):
            if not _PREFIXED.match(str(node.title)):
                _collect((node.text if node.text is not None else node.title).nodes, pieces)
        elif isinstance(node, ExternalLink):
            if node.title is not None:
                _collect(node.title.nodes, pieces)
        elif isinstance(node, HTMLEntity):
            pieces.append(node.normalize())
        elif isinstance(node, Tag):
            name = str(node.tag).strip().lower()
            if name in _LIST_ITEMS:
                pieces.append("\x01")
            elif name == "br":
                pieces.append(" ")
            elif name not in _NO_PROSE and node.contents is not None:
                _collect(node.contents.nodes, pieces)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
