"""Wikitext, Wikipedia's markup: reduction to paragraphs of plain text with mwparserfromhell."""

import itertools
import re
from collections import Counter
from typing import Any

_NO_PROSE = {
    "ref", "references", "gallery", "math", "chem", "timeline", "syntaxhighlight", "source",
    "score", "pre", "code",
    "table", "imagemap", "graph", "templatestyles", "hiero", "ce", "mapframe", "maplink",
    "categorytree", "inputbox",
}  # fmt: skip
_LIST_ITEMS = {"li", "dt", "dd"}
# they begin and end a paragraph
_BLOCKS = {"p", "div", "center", "blockquote", "poem", "hr", "ul", "ol", "dl"}
# Link targets such as `File:a.jpg`, which are no part of the text. With a colon before, they are
# ordinary links.
_PREFIXED = re.compile(r"^\s*[^\s:|\[\]][^:|\[\]]*:\S")
# Lines with nothing but comments. MediaWiki removes them with their line break, so they do not end
# a paragraph.
_COMMENT_LINES = re.compile(r"(?<=\n)[ \t]*(?:<!--(?:[^-<]|-(?!->)|<(?!!--))*-->[ \t]*)+\n")
# `__NOTOC__` and the like, in any language
_SWITCH = re.compile(r"__[^\W\da-z_](?:[^\W\da-z_]|_(?!_))*__")
# Characters that XML cannot contain mark list items, and lines that begin with a space, which are
# paragraphs.
_ITEM, _INDENT = "\x01", "\x02"
_ITEM_LINE, _INDENTED = re.compile(rf"(?m)^.*{_ITEM}.*$"), re.compile(rf"(?m)^{_INDENT}(.*)$")
_BLANK = re.compile(r"\n\s*\n")
# templates and tables without an end, which the parser keeps
_UNENDED = re.compile(r"(?m)\{\{|^(?:\||\{\|)")
_SPACE = re.compile(r"\s+")
_EMPTY_BRACKETS = re.compile(r"\s*\(\s*[,;]*\s*\)")
_BEFORE_POINT = re.compile(r"\s+([,.;:!?])")
_TAG = re.compile(r"<(/?)([a-zA-Z]+)([^<>]*)(>?)")
# the time of the parser grows faster than the square of the number of elements without an end
_MOST_OPEN = 500
# a paragraph with fewer words is assumed to be a caption, a heading or the remainder of a template
LEAST_WORDS = 5


def clean(wikitext: str) -> list[str]:
    """Reduce wikitext to paragraphs of five or more words, without markup and line breaks."""
    from mwparserfromhell.parser import Parser
    from mwparserfromhell.parser.builder import Builder

    _check_ends(wikitext)
    pieces: list[str] = []
    parser, builder = Parser(), Builder()  # type: ignore[no-untyped-call]
    tokens = parser._tokenizer.tokenize(_COMMENT_LINES.sub("", wikitext))
    _collect(builder.build(_without_markup(tokens)).nodes, pieces)  # type: ignore[no-untyped-call]
    # &#xD800; and the like are no characters
    prose = "".join(pieces).encode("utf-8", "replace").decode()
    prose = _INDENTED.sub(r"\n\1\n", _ITEM_LINE.sub("", _SWITCH.sub("", prose)))
    found = []
    for paragraph in _BLANK.split(prose):
        text = _SPACE.sub(" ", paragraph.replace("\x00", "")).strip()
        text = _BEFORE_POINT.sub(r"\1", _EMPTY_BRACKETS.sub("", text))
        if len(text.split()) >= LEAST_WORDS and not _UNENDED.search(paragraph):
            found.append(text)
    return found


def _check_ends(wikitext: str) -> None:
    """Raise ValueError for a page with which the parser would be busy for minutes or longer."""
    from mwparserfromhell.definitions import is_single

    excess = Counter({"<!--": wikitext.count("<!--") - wikitext.count("-->")})
    excess["["] = max(line.count("[") - line.count("]") for line in wikitext.split("\n"))
    for closes, name, attributes, end in _TAG.findall(wikitext):
        if not end:
            excess[f"<{name.lower()} without >"] += 1
        elif not (attributes.endswith("/") or is_single(name)):
            excess[f"<{name.lower()}>"] += -1 if closes else 1
    (worst, number), *_ = excess.most_common(1)
    if number > _MOST_OPEN:
        raise ValueError(f"{number} times {worst} without an end")


def _without_markup(tokens: list[Any]) -> list[Any]:
    """Remove templates, comments, headings and tags without prose."""
    # Building their nodes takes two thirds of the time.
    from mwparserfromhell.parser import tokens as kinds

    dropped = {kinds.TemplateOpen, kinds.ArgumentOpen, kinds.CommentStart, kinds.HeadingStart}
    begins = {*dropped, kinds.TagOpenOpen}
    ends = {
        kinds.TemplateClose, kinds.ArgumentClose, kinds.CommentEnd, kinds.HeadingEnd,
        kinds.TagCloseClose,
        kinds.TagCloseSelfclose,
    }  # fmt: skip
    # depth: number of open elements, counted from the outermost one that is removed
    kept, depth = [], 0
    for token, following in itertools.pairwise([*tokens, None]):
        kind = type(token)
        if depth:
            depth += (kind in begins) - (kind in ends)
        elif kind in dropped or (
            kind is kinds.TagOpenOpen and str(following.text).strip().lower() in _NO_PROSE
        ):
            depth = 1
        else:
            kept.append(token)
    return kept


def _collect_link(link: Any, pieces: list[str]) -> None:
    """Append what a link shows to `pieces`; links to files and categories show nothing."""
    title = str(link.title)
    if _PREFIXED.match(title):
        return
    if link.text is not None and link.text.nodes:
        _collect(link.text.nodes, pieces)
    elif title.lstrip().startswith(":"):
        pieces.append(title.strip().lstrip(":"))
    else:
        _collect(link.title.nodes, pieces)


def _collect(nodes: Any, pieces: list[str]) -> None:
    """Append the plain text of nodes to `pieces`."""
    # `_ITEM` stands in list items, and `_INDENT` before indented lines.
    from mwparserfromhell.nodes import ExternalLink, HTMLEntity, Tag, Text, Wikilink

    for node in nodes:
        if isinstance(node, Text):
            pieces.append(str(node.value).replace("\n ", f"\n{_INDENT}"))
        elif isinstance(node, HTMLEntity):
            pieces.append(node.normalize())
        elif isinstance(node, ExternalLink):
            _collect([] if node.title is None else node.title.nodes, pieces)
        elif isinstance(node, Wikilink):
            _collect_link(node, pieces)
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
