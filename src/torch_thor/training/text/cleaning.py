"""The first stage of preparing a corpus: each work unit is converted to a file of documents, split into sentences."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_thor.training.output_files import write_whole
from torch_thor.training.text.arrow_files import REMEDY, read_table, write_table
from torch_thor.training.text.document import Document, Fault
from torch_thor.training.text.sources import Unit
from torch_thor.training.text.wikipedia import articles

DOCUMENTS, REPORT = ".arrow", ".json"  # suffixes of the files of a unit


@dataclass(frozen=True)
class CleanReport:
    """The result of cleaning a unit.

    Args:
        documents: Number of documents with at least one sentence.
        sentences: Number of sentences in these documents.
        characters: Number of characters in these sentences.
        faults: The parts of the unit that could not be read.
    """

    documents: int
    sentences: int
    characters: int
    faults: tuple[Fault, ...]


def clean_unit(unit: Unit, folder: Path, language: str, held_out: float, seed: int) -> CleanReport:
    """Clean a unit, split its documents into sentences, and write the documents and a report.

    Args:
        unit: The unit.
        folder: The folder for the files of this stage.
        language: The language code of the text, such as `en` or `de`. It selects the rules for sentence boundaries.
        held_out: The fraction of the documents that are held out, that is, not used for training.
        seed: The seed that determines which documents are held out.

    Returns:
        The report, which is also written next to the documents.
    """
    from sentencex import segment

    faults = list(unit.faults)
    names, sides, texts = [], [], []
    for one in _documents(unit):
        if isinstance(one, Fault):
            faults.append(one)
            continue
        sentences = [text for paragraph in one.paragraphs for s in segment(language, paragraph) if (text := s.strip())]
        if sentences:
            names.append(one.name)
            sides.append(is_held_out(one.name, held_out, seed))
            texts.append(sentences)
    import pyarrow as pa

    types = {"name": pa.string(), "held_out": pa.bool_(), "sentences": pa.list_(pa.string())}
    columns = {"name": names, "held_out": sides, "sentences": texts}
    write_table(unit_file(folder, unit.number, DOCUMENTS), columns, types)
    characters = sum(len(sentence) for sentences in texts for sentence in sentences)
    report = CleanReport(len(texts), sum(map(len, texts)), characters, tuple(faults))
    # written last, because a unit counts as finished when its report exists
    write_whole(unit_file(folder, unit.number, REPORT), json.dumps(asdict(report)), REMEDY)
    return report


def _documents(unit: Unit) -> Iterator[Document | Fault]:
    yield from unit.documents
    yield from articles(unit.source, unit.header, unit.pages)


def is_held_out(name: str, share: float, seed: int) -> bool:
    """Decide whether a document is held out.

    The decision depends only on the arguments, so it is the same for any order of the documents and on any machine.

    Args:
        name: The name of the document.
        share: The fraction of the documents that are held out.
        seed: The seed of the selection. A different seed selects different documents.

    Returns:
        Whether the document is held out.
    """
    digest = hashlib.blake2b(f"{seed}\n{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def unit_file(folder: Path, number: int, suffix: str) -> Path:
    """Return the path of one of the two files of a unit.

    Args:
        folder: The folder for the files of this stage.
        number: The number of the unit.
        suffix: `DOCUMENTS`, or `REPORT` for the report, which exists if and only if the unit is finished.

    Returns:
        The path of the file.
    """
    return folder / f"{number:06d}{suffix}"


def stored_report(folder: Path, number: int) -> CleanReport | None:
    """Read the report of a unit.

    Args:
        folder: The folder for the files of this stage.
        number: The number of the unit.

    Returns:
        The report, or `None` if the unit is not finished.
    """
    file = unit_file(folder, number, REPORT)
    if not file.exists():
        return None
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return CleanReport(**{**values, "faults": tuple(Fault(**fault) for fault in values["faults"])})


def sentences_of(folder: Path, number: int, share: float, seed: int) -> Iterator[str]:
    """Read the sentences of all documents of a unit, or of a fraction of them.

    Args:
        folder: The folder for the files of this stage.
        number: The number of the unit.
        share: The fraction of the documents that are read; 1 or more reads all of them.
        seed: The seed that determines which documents are read.

    Yields:
        The sentences, in the order of the documents.
    """
    table = read_table(unit_file(folder, number, DOCUMENTS))
    for name, sentences in zip(table["name"], table["sentences"], strict=True):
        if share >= 1 or is_held_out(name.as_py(), share, seed):
            yield from sentences.as_py()
