"""Wikipedia dumps (`*-pages-articles*.xml.bz2`): division into pages, parsing with mwxml, and reduction to paragraphs.

The dump is read as a stream and divided at `<page>` and `</page>`. These tags cannot occur inside a page, because its
text is escaped. Line breaks in the dump are not needed. As a result, memory use does not depend on the size of the
dump, pages can be parsed by several processes in parallel, and a page that is not well-formed affects no other page.
"""

import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_thor.training.text.document import Document, Fault

_BEGIN, _END, _CLOSE, _SITE = b"<page>", b"</page>", b"</mediawiki>", b"</siteinfo>"
# Replaces a damaged header. It defines no namespaces, so only the namespace number of a page marks it as an article.
_PLAIN_HEADER = b"<mediawiki><siteinfo><namespaces></namespaces></siteinfo>"
LARGEST_PAGE = 1 << 26  # bytes; the largest pages of Wikipedia have about 2 MB

# Tags whose contents are not prose.
_NO_PROSE = {
    "ref", "references", "gallery", "math", "chem", "timeline", "syntaxhighlight", "source", "score", "pre", "code",
    "table", "imagemap", "graph", "templatestyles", "hiero", "ce", "mapframe", "maplink", "categorytree", "inputbox",
}  # fmt: skip
_LIST_ITEMS = {"li", "dt", "dd"}
# Tags that begin and end a paragraph.
_BLOCKS = {"p", "div", "center", "blockquote", "poem", "hr", "ul", "ol", "dl"}
# Matches link targets with a prefix (`File:`, `Category:`, `de:`), which are not articles of this wiki and are not
# shown in the text. With a colon before the prefix, they are ordinary links.
_PREFIXED = re.compile(r"^\s*[^\s:|\[\]][^:|\[\]]*:\S")
_CONTEXT = re.compile(r"\s*\([^()]*\)\s*$|,\s.*$", re.DOTALL)  # what the pipe trick does not show of a title
# Lines with nothing but comments. MediaWiki removes them with their line break, so they do not end a paragraph.
_COMMENT_LINES = re.compile(r"(?<=\n)[ \t]*(?:<!--(?:[^-<]|-(?!->)|<(?!!--))*-->[ \t]*)+\n")
_SWITCH = re.compile(r"__[^\W\da-z_](?:[^\W\da-z_]|_(?!_))*__")  # `__NOTOC__` and the like, in any language
_SENTENCES = re.compile(r".*[.!?][\"'”’)]*(?=\s|$)", re.DOTALL)  # the whole sentences at the beginning of a text
# Templates of disambiguation pages of large Wikipedias. {{disambiguation needed}} marks a link in an ordinary article.
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:template:\s*)?(?:[\w ]+ )?"
    r"(?:disambiguation|disambig|disamb|dab|hndis|geodis|numberdis|begriffsklärung|homonymie|desambiguación|"
    r"desambiguação|disambigua|doorverwijspagina)\b(?!\s+needed)",
    re.IGNORECASE,
)
_REDIRECT = re.compile(r"^\s*#redirect\b", re.IGNORECASE)
_ITEM, _INDENT = "\x01", "\x02"  # characters that XML cannot contain mark list items and lines that begin with a space
_SPACE = re.compile(r"\s+")
_EMPTY_BRACKETS = re.compile(r"\s*\(\s*[,;]*\s*\)")
_BEFORE_POINT = re.compile(r"\s+([,.;:!?])")
_LEAST_WORDS = 5  # a paragraph with fewer words is assumed to be a caption, a label or the remainder of a template


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


def clean(wikitext: str) -> tuple[str, ...]:
    """Reduce wikitext to paragraphs of plain text.

    Templates, tables, references, headings, lists, pictures, categories, formulas, comments and behaviour switches are
    left out. Links are replaced by their text. A template or table without an end is left out up to the end of the
    paragraph, and so are the paragraphs after it that have lines of a table or of parameters.

    Args:
        wikitext: The wikitext of a page.

    Returns:
        The paragraphs with five or more words, without markup and line breaks.
    """
    from mwparserfromhell.parser import Parser
    from mwparserfromhell.parser.builder import Builder

    pieces: list[str] = []
    parser, builder = Parser(), Builder()  # type: ignore[no-untyped-call]
    tokens = parser._tokenizer.tokenize(_COMMENT_LINES.sub("", wikitext))
    _collect(builder.build(_without_markup(tokens)).nodes, pieces)  # type: ignore[no-untyped-call]
    prose = "".join(pieces).encode("utf-8", "replace").decode()  # &#xD800; and the like are no characters
    found = []
    for paragraph in _paragraphs(_SWITCH.sub("", prose)):
        text = _SPACE.sub(" ", paragraph.replace("\x00", "")).strip()
        text = _BEFORE_POINT.sub(r"\1", _EMPTY_BRACKETS.sub("", text))
        if len(text.split()) >= _LEAST_WORDS:
            found.append(text)
    return tuple(found)


def _paragraphs(prose: str) -> Iterator[str]:
    """Join the lines of paragraphs, and leave out templates and tables without an end, which the parser keeps."""
    in_table = False
    for lines in _divided(prose):
        if in_table or any(line.startswith(("|", "{|")) for line in lines):
            marks = ("|", "{|", "!") if in_table else ("|", "{|")
            begin = next((number for number, line in enumerate(lines) if line.startswith(marks)), len(lines))
            for line in lines[begin:]:
                in_table = (in_table or line.startswith("{|")) and not line.startswith("|}")
            lines = lines[:begin]
        paragraph = "\n".join(lines)
        if (begin := paragraph.find("{{")) >= 0:
            sentences = _SENTENCES.match(paragraph, 0, begin)
            paragraph = "" if sentences is None else sentences[0]
        yield paragraph


def _divided(prose: str) -> Iterator[list[str]]:
    """Divide text into paragraphs at blank lines, list items and lines that begin with a space; yields their lines."""
    lines: list[str] = []
    for line in prose.split("\n"):
        if _ITEM in line or not line.strip():
            yield lines
            lines = []
        elif line.startswith(_INDENT):
            yield lines
            yield [line[len(_INDENT) :]]
            lines = []
        else:
            lines.append(line)
    yield lines


def _without_markup(tokens: list[Any]) -> list[Any]:
    """Remove templates, comments, headings and tags without prose; building their nodes takes most of the time."""
    from mwparserfromhell.parser import tokens as kinds

    dropped = {kinds.TemplateOpen, kinds.ArgumentOpen, kinds.CommentStart, kinds.HeadingStart}
    begins = {*dropped, kinds.TagOpenOpen}
    ends = {
        kinds.TemplateClose, kinds.ArgumentClose, kinds.CommentEnd, kinds.HeadingEnd, kinds.TagCloseClose,
        kinds.TagCloseSelfclose,
    }  # fmt: skip
    kept, depth = [], 0  # depth: number of open elements, counted from the outermost one that is removed
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
    """Append the plain text of nodes to `pieces`, with `_ITEM` in list items and `_INDENT` before indented lines."""
    from mwparserfromhell.nodes import ExternalLink, HTMLEntity, Tag, Text, Wikilink

    for node in nodes:
        if isinstance(node, Text):
            pieces.append(str(node.value).replace("\n ", f"\n{_INDENT}"))
        elif isinstance(node, Wikilink):
            _collect_link(node, pieces)
        elif isinstance(node, ExternalLink):
            if node.title is not None:
                _collect(node.title.nodes, pieces)
        elif isinstance(node, HTMLEntity):
            pieces.append(node.normalize())
        elif isinstance(node, Tag):
            name = str(node.tag).strip().lower()
            if name in _LIST_ITEMS:
                pieces.append(_ITEM)
            elif name == "br":
                pieces.append(" ")
            elif name not in _NO_PROSE:
                around = "\n\n" if name in _BLOCKS else ""
                pieces.append(around)
                _collect([] if node.contents is None else node.contents.nodes, pieces)
                pieces.append(around)


def _collect_link(link: Any, pieces: list[str]) -> None:
    """Append the text that a link shows."""
    title = str(link.title)
    if _PREFIXED.match(title):
        return
    if link.text is not None and link.text.nodes:
        _collect(link.text.nodes, pieces)
    elif not title.lstrip().startswith(":"):
        if link.text is None:
            _collect(link.title.nodes, pieces)
        else:  # the pipe trick: [[Paris, Texas|]] is shown as Paris
            pieces.append(_CONTEXT.sub("", title))
    else:
        name = title.strip().lstrip(":")
        pieces.append(name if link.text is None else _CONTEXT.sub("", name.rpartition(":")[2]))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
