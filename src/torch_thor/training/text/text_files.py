"""Conversion of text and HTML files to documents.

A text file is one document, and its paragraphs are separated by blank lines. A text file of more than 65536 characters
(a book or a dictionary, for example) is divided at blank lines into documents of about that size. These are read one
after the other, so that memory use does not depend on the size of the file. An HTML file is one document, which
consists of the text of its paragraphs. It is read as a whole, and a file of more than `LARGEST_HTML` bytes is left out.

A paragraph with bytes that are not UTF-8 is left out, and the text before and after it is kept.
"""

import codecs
import re
from collections.abc import Iterator

from torch_thor.training.text.compressed import DAMAGED, ByteStream, base_suffix
from torch_thor.training.text.document import Document, Fault

TEXT = (".txt", ".text", ".md", ".rst", ".pod", ".dict")
HTML = (".html", ".htm", ".xhtml")

LARGEST_DOCUMENT = 1 << 16  # number of characters after which a text file is divided at the next blank line
LARGEST_HTML = 1 << 25  # bytes; Beautiful Soup needs about 45 times as much memory
NAMED_PARAGRAPHS = 1000  # number of damaged paragraphs in a file after which one fault names all those of a document
_LONGEST_PARAGRAPH = 1 << 20  # number of characters after which a text without a blank line is divided
_LONG_PARAGRAPH = 1 << 12  # number of characters of a damaged paragraph beyond which its undamaged lines are kept
_LEAST_WORDS = 5  # a paragraph with fewer words is assumed to be a heading or a label

_SPACE = re.compile(r"\s+")
_BLANK = re.compile(r"\n[ \t\r]*\n")
_LINE_END = re.compile(r"\n")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as `surrogateescape` decodes them
_BOM = "\ufeff"
_PARAGRAPHS = ("p", "dd")  # `dd`: descriptions in definition lists are often prose
_LEFT_OUT = ("script", "style", "nav", "header", "footer", "table", "pre", "form", "figure")


def paragraphs_of(text: str) -> tuple[str, ...]:
    """Divide plain text into paragraphs at blank lines.

    Args:
        text: The text.

    Returns:
        The paragraphs with five or more words, without line breaks.
    """
    found = (_SPACE.sub(" ", paragraph).strip() for paragraph in _BLANK.split(text))
    return tuple(paragraph for paragraph in found if len(paragraph.split()) >= _LEAST_WORDS)


def documents_of(stream: ByteStream, name: str) -> Iterator[Document | Fault]:
    """Read the documents of a text or HTML file.

    Args:
        stream: The bytes of the file.
        name: The name of the file, from which the names of the documents are formed.

    Yields:
        The documents of the file, and a fault for each paragraph that is not UTF-8. Documents without paragraphs are
        left out.

    Raises:
        UnicodeDecodeError: If the file is UTF-16.
        Exception: One of `DAMAGED`, if the compressed data are truncated or damaged. The paragraphs before this place
            have been yielded, except for those of an HTML file.
    """
    yield from _html_document(stream, name) if base_suffix(stream.path) in HTML else _text_documents(stream, name)


def _text_documents(stream: ByteStream, name: str) -> Iterator[Document | Fault]:
    named = 0
    for title, offset, text in _divided(stream, name):
        damaged: list[int] = []
        try:
            text.encode()
        except UnicodeEncodeError:
            text, damaged = _without_damage(text, offset)
        for number, place in enumerate(damaged):
            if named >= NAMED_PARAGRAPHS:
                yield _not_utf8(name, place, len(damaged) - number)
                break
            named += 1
            yield _not_utf8(name, place)
        if found := paragraphs_of(text):
            yield Document(title, found)


def _divided(stream: ByteStream, name: str) -> Iterator[tuple[str, int, str]]:
    """Divide a text file: yields the name, the offset in the file in bytes, and the text of each document."""
    number, offset, rest, failure = 0, 0, "", None
    try:
        for text in _decoded(stream):
            rest += text
            if offset == 0 and rest.startswith(_BOM):
                offset, rest = _size(_BOM), rest[len(_BOM) :]
            while len(rest) > LARGEST_DOCUMENT:
                blank = _BLANK.search(rest, LARGEST_DOCUMENT)
                if blank is None and len(rest) < _LONGEST_PARAGRAPH:
                    break
                cut = _place_to_cut(rest) if blank is None else blank.end()
                number += 1
                yield f"{name}#{number}", offset, rest[:cut]
                offset, rest = offset + _size(rest[:cut]), rest[cut:]
    except DAMAGED as error:
        failure = error
        ends = [found.end() for found in _BLANK.finditer(rest)]
        rest = rest[: ends[-1]] if ends else ""  # without the paragraph that ends at the damaged place
    yield f"{name}#{number + 1}" if number else name, offset, rest
    if failure is not None:
        raise failure


def _place_to_cut(text: str) -> int:
    """Return where to divide a long text without a blank line: after a line, otherwise after a word, if possible."""
    if line := text.rfind("\n", 0, LARGEST_DOCUMENT) + 1:
        return line
    spaces = [found.end() for found in _SPACE.finditer(text, 0, LARGEST_DOCUMENT)]
    return spaces[-1] if spaces else LARGEST_DOCUMENT


def _without_damage(text: str, offset: int, ends: re.Pattern[str] = _BLANK) -> tuple[str, list[int]]:
    """Leave out the paragraphs that are not UTF-8. Of a long paragraph, only the damaged lines are left out.

    Args:
        text: A text, decoded with the error handler `surrogateescape`.
        offset: Its offset in the file, in bytes.
        ends: What separates the parts of the text.

    Returns:
        The text without the damaged parts, and the offset in the file of the first damaged byte of each of them.
    """
    kept, damaged, begin = [], [], 0
    for end in [*ends.finditer(text), None]:
        part = text[begin : len(text) if end is None else end.end()]
        if bad := _NOT_UTF8.search(part):
            if ends is _BLANK and len(part) > _LONG_PARAGRAPH:
                lines, places = _without_damage(part, offset, _LINE_END)
                kept.append(f"{lines}\n\n")
                damaged += places
            else:
                kept.append("\n\n")  # the text before and after it is not one paragraph
                damaged.append(offset + _size(part[: bad.start()]))
        else:
            kept.append(part)
        offset, begin = offset + _size(part), begin + len(part)
    return "".join(kept), damaged


def _html_document(stream: ByteStream, name: str) -> Iterator[Document | Fault]:
    parts = []
    for text in _decoded(stream):
        parts.append(text)
        if stream.read > LARGEST_HTML:
            size = f"more than {LARGEST_HTML >> 20} MB"
            yield Fault(name, 0, f"it has {size}, too much for an HTML file: divide it, or convert it to text")
            return
    markup = "".join(parts)
    found, damaged = _html_paragraphs(markup)
    for place in damaged:
        yield _not_utf8(name, _size(markup[:place]))
    if found:
        yield Document(name, found)


def html_paragraphs(markup: str) -> tuple[str, ...]:
    """Extract the paragraphs of an HTML page.

    Args:
        markup: The HTML source of the page.

    Returns:
        The text of the paragraphs with five or more words. Tables, preformatted text and navigation are left out.
    """
    return _html_paragraphs(markup)[0]


def _html_paragraphs(markup: str) -> tuple[tuple[str, ...], list[int]]:
    """Return the paragraphs, and the place in `markup` of the first damaged byte of each that is not UTF-8."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(markup, "html.parser")
    for tag in soup(_LEFT_OUT):
        tag.decompose()
    found, damaged = [], []
    lines = [0, *(end.end() for end in _LINE_END.finditer(markup))]
    for tag in soup(_PARAGRAPHS):
        text = _SPACE.sub(" ", tag.get_text().replace("¶", "")).strip()
        if tag.find(_PARAGRAPHS) is not None:
            continue
        if _NOT_UTF8.search(text):
            bad = _NOT_UTF8.search(markup, lines[(tag.sourceline or 1) - 1] + (tag.sourcepos or 0))
            assert bad is not None
            damaged.append(bad.start())
        elif len(text.split()) >= _LEAST_WORDS:
            found.append(text)
    return tuple(found), damaged


def _decoded(stream: ByteStream) -> Iterator[str]:
    """Decode UTF-8. Bytes that are not UTF-8 become single surrogates, which encode to these bytes again."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for chunk in stream:
        if stream.read == len(chunk) and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UnicodeDecodeError("utf-8", chunk, 0, 1, "it is UTF-16")
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _not_utf8(name: str, offset: int, paragraphs: int = 1) -> Fault:
    what = "a paragraph is" if paragraphs == 1 else f"{paragraphs} paragraphs from here on are"
    return Fault(name, offset, f"it is not UTF-8, {what} left out: convert it with iconv -t utf-8")
