"""Conversion of text and HTML files to documents.

A text file is one document, and its paragraphs are separated by blank lines. A text file of more than 65536 characters
(a book or a dictionary, for example) is divided at blank lines into documents of about that size. These are read one
after the other, so that memory use does not depend on the size of the file. An HTML file is one document, which
consists of the text of its paragraphs.
"""

import codecs
import re
from collections.abc import Iterator

from torch_thor.training.text.compressed import ByteStream, base_suffix
from torch_thor.training.text.document import Document

TEXT = (".txt", ".text", ".md", ".rst", ".pod", ".dict")
HTML = (".html", ".htm", ".xhtml")

LARGEST_DOCUMENT = 1 << 16  # number of characters after which a text file is divided at the next blank line
_LONGEST_PARAGRAPH = 1 << 20  # number of characters after which a text without a blank line is divided
_LEAST_WORDS = 5  # a paragraph with fewer words is assumed to be a heading or a label

_SPACE = re.compile(r"\s+")
_BLANK = re.compile(r"\n[ \t\r]*\n")
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


def documents_of(stream: ByteStream, name: str) -> Iterator[Document]:
    """Read the documents of a text or HTML file.

    Args:
        stream: The bytes of the file.
        name: The name of the file, from which the names of the documents are formed.

    Yields:
        The documents of the file. Documents without paragraphs are left out.

    Raises:
        UnicodeDecodeError: If the file is not valid UTF-8. `start` is the byte offset in the uncompressed file.
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
    """Extract the paragraphs of an HTML page.

    Args:
        markup: The HTML source of the page.

    Returns:
        The text of the paragraphs with five or more words. Tables, preformatted text and navigation are left out.
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
        held = len(decoder.getstate()[0])  # bytes of an incomplete character at the end of the previous chunk
        try:
            yield decoder.decode(chunk)
        except UnicodeDecodeError as error:
            start = stream.read - len(chunk) - held + error.start
            raise UnicodeDecodeError("utf-8", error.object, start, start + 1, error.reason) from error
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UnicodeDecodeError("utf-8", error.object, stream.read, stream.read + 1, error.reason) from error
