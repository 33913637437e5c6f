"""The first stage of preparing a corpus: each work unit becomes a file of documents, cut into sentences."""

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


@dataclass(frozen=True)
class CleanReport:
    """What a unit came to.

    Args:
        documents: Documents that have prose.
        sentences: Their sentences.
        characters: Their characters.
        faults: What could not be read.
    """

    documents: int
    sentences: int
    characters: int
    faults: tuple[Fault, ...]


def clean_unit(unit: Unit, folder: Path, language: str, held_out: float, seed: int) -> CleanReport:
    """Clean a unit, cut its documents into sentences, and write them.

    Args:
        unit: The unit.
        folder: Where files of this stage go.
        language: Of the text, for the rules of sentence ends: `en`, `de`, ...
        held_out: Share of the documents that are not trained on.
        seed: Decides which.

    Returns:
        What it came to; stored beside the documents.
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
    write_table(documents_file(folder, unit.number), {"name": names, "held_out": sides, "sentences": texts}, types)
    characters = sum(len(sentence) for sentences in texts for sentence in sentences)
    report = CleanReport(len(texts), sum(map(len, texts)), characters, tuple(faults))
    # written last: a unit is finished when its report is there
    write_whole(report_file(folder, unit.number), json.dumps(asdict(report)), REMEDY)
    return report


def _documents(unit: Unit) -> Iterator[Document | Fault]:
    yield from unit.documents
    yield from articles(unit.source, unit.header, unit.pages)


def is_held_out(name: str, share: float, seed: int) -> bool:
    """Decide whether a document is held out, from its name alone: the same in any order and on any machine.

    Args:
        name: The document's name.
        share: Share of the documents that are.
        seed: Another seed holds out others.

    Returns:
        Whether it is.
    """
    digest = hashlib.blake2b(f"{seed}\n{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def documents_file(folder: Path, number: int) -> Path:
    """The documents of a unit.

    Args:
        folder: Of this stage.
        number: The unit.

    Returns:
        The file.
    """
    return folder / f"{number:06d}.arrow"


def report_file(folder: Path, number: int) -> Path:
    """The report of a unit; it is there when the unit is finished.

    Args:
        folder: Of this stage.
        number: The unit.

    Returns:
        The file.
    """
    return folder / f"{number:06d}.json"


def stored_report(folder: Path, number: int) -> CleanReport | None:
    """What a unit came to when it was cleaned.

    Args:
        folder: Of this stage.
        number: The unit.

    Returns:
        The report; `None` where the unit is not finished.
    """
    file = report_file(folder, number)
    if not file.exists():
        return None
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return CleanReport(**{**values, "faults": tuple(Fault(**fault) for fault in values["faults"])})


def sentences_of(folder: Path, number: int, share: float, seed: int) -> Iterator[str]:
    """Read the sentences of a unit's documents, or of a share of them.

    Args:
        folder: Of this stage.
        number: The unit.
        share: Share of the documents.
        seed: Decides which.

    Yields:
        Sentences.
    """
    table = read_table(documents_file(folder, number))
    for name, sentences in zip(table["name"], table["sentences"], strict=True):
        if share >= 1 or is_held_out(name.as_py(), share, seed):
            yield from sentences.as_py()
