"""Text and HTML files as documents.

A text file is one document; paragraphs are separated by blank lines. A file of more than 64 kB (a book, a dictionary)
is cut at blank lines into documents of about that size, which are read one after the other, so that memory does not
depend on the size of the file. An HTML file is one document: the text of its paragraphs.
"""

import codecs
import re
from collections.abc import Iterator

from torch_thor.training.text.compressed import ByteStream, base_suffix
from torch_thor.training.text.document import Document

TEXT = (".txt", ".text", ".md", ".rst", ".pod", ".dict")
HTML = (".html", ".htm", ".xhtml")

LARGEST_DOCUMENT = 1 << 16  # characters after which a text file is cut at the next blank line
_LONGEST_PARAGRAPH = 1 << 20  # characters after which it is cut anyway
_LEAST_WORDS = 5  # a line with fewer is a heading or a label

_SPACE = re.compile(r"\s+")
_BLANK = re.compile(r"\n[ \t\r]*\n")
_PARAGRAPHS = ("p", "dd")  # of lists too, where they are prose
_LEFT_OUT = ("script", "style", "nav", "header", "footer", "table", "pre", "form", "figure")


def paragraphs_of(text: str) -> tuple[str, ...]:
    """Separate the paragraphs of plain text.

    Args:
        text: Any text.

    Returns:
        Its paragraphs of five words or more, without line breaks.
    """
    found = (_SPACE.sub(" ", paragraph).strip() for paragraph in _BLANK.split(text))
    return tuple(paragraph for paragraph in found if len(paragraph.split()) >= _LEAST_WORDS)


def documents_of(stream: ByteStream, name: str) -> Iterator[Document]:
    """Read a file.

    Args:
        stream: A text or HTML file.
        name: What it is called in messages.

    Yields:
        Its documents; none where there is no prose.

    Raises:
        UnicodeDecodeError: If the file is no UTF-8; `start` counts from the beginning of the uncompressed file.
    """
    if base_suffix(stream.path) in HTML:
        if found := html_paragraphs("".join(_decoded(stream))):
            yield Document(name, found)
        return
    number, rest = 0, ""
    for text in _decoded(stream):
        rest += text
        while len(rest) > LARGEST_DOCUMENT:
            blank = _BLANK.search(rest, LARGEST_DOCUMENT)
            if blank is None and len(rest) < _LONGEST_PARAGRAPH:
                break
            cut = LARGEST_DOCUMENT if blank is None else blank.end()
            number += 1
            if found := paragraphs_of(rest[:cut]):
                yield Document(f"{name}#{number}", found)
            rest = rest[cut:]
    if found := paragraphs_of(rest):
        yield Document(f"{name}#{number + 1}" if number else name, found)


def html_paragraphs(markup: str) -> tuple[str, ...]:
    """Take the paragraphs out of HTML.

    Args:
        markup: An HTML page.

    Returns:
        The text of its paragraphs of five words or more; tables, preformatted text and navigation are left out.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(markup, "html.parser")
    for tag in soup(_LEFT_OUT):
        tag.decompose()
    found = []
    for tag in soup(_PARAGRAPHS):
        text = _SPACE.sub(" ", tag.get_text().replace("¶", "")).strip()
        if tag.find(_PARAGRAPHS) is None and len(text.split()) >= _LEAST_WORDS:
            found.append(text)
    return tuple(found)


def _decoded(stream: ByteStream) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    for chunk in stream:
        held = len(decoder.getstate()[0])  # the first bytes of a character that the last chunk has begun
        try:
            yield decoder.decode(chunk)
        except UnicodeDecodeError as error:
            start = stream.read - len(chunk) - held + error.start
            raise UnicodeDecodeError("utf-8", error.object, start, start + 1, error.reason) from error
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UnicodeDecodeError("utf-8", error.object, stream.read, stream.read + 1, error.reason) from error
