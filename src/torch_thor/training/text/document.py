"""The common output of all text sources: documents, and the faults found while reading."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """An article, a file or a section, as consecutive paragraphs of text.

    Args:
        name: A title or a path, used in messages; unique within its source.
        paragraphs: The paragraphs as plain text without line breaks, in order.
    """

    name: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """A part of a source that could not be read and was left out.

    Args:
        source: The name of the source file.
        offset: The position of the fault in the uncompressed file, in bytes from its beginning.
        reason: A description of the fault, in one line.
    """

    source: str
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, byte {self.offset} of its uncompressed contents: {self.reason}"
