"""What every source of text is turned into: documents, and the faults that were met on the way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One article, file or section: text that belongs together, in its order.

    Args:
        name: A title or a path, for messages; unique within its source.
        paragraphs: Plain text without line breaks.
    """

    name: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """Something in a source that could not be read, and was left out.

    Args:
        source: The file.
        offset: Bytes from the beginning of the uncompressed file to where the fault was met.
        reason: What is wrong, in one line.
    """

    source: str
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, byte {self.offset} of its uncompressed contents: {self.reason}"
