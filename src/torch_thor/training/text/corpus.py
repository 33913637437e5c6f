"""A prepared corpus: its files, how they are written, and random access to its examples.

They are mapped into memory.

`train.arrow` and `held-out.arrow` have one document per row. `tokens` are the ids of all its
sentences, and `ends` the end of each sentence in `tokens`. The column with the name of a length
holds the examples of that length: the first and last (exclusive) sentences, whose tokens fill an
example together with [CLS] and two [SEP].
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_thor.errors import require
from torch_thor.files import sha256, whole_file

MANIFEST, TOKENIZER, TRAIN, HELD_OUT = (
    "manifest.json",
    "tokenizer.json",
    "train.arrow",
    "held-out.arrow",
)
FORMAT = 4  # of the manifest and the files
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
UNIT = 1 << 22  # approximate number of bytes of source text whose documents are a batch of rows


def open_manifest(
    folder: Path, names: Sequence[str] = (TOKENIZER, TRAIN, HELD_OUT)
) -> dict[str, Any]:
    """Read a corpus's manifest, and refuse the corpus if a file is missing or has changed."""
    require(
        (folder / MANIFEST).is_file(),
        f"{folder} is no prepared corpus (no {MANIFEST}): make one with torch-thor prepare",
    )
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["sha256"] if manifest["format"] == FORMAT else {}
    except (ValueError, KeyError, TypeError):
        expected = {}
    for file in (folder / name for name in names):
        status = file.stat() if file.is_file() else None
        require(
            status is not None
            and _known_sha256(file, status.st_size, status.st_mtime_ns) == expected.get(file.name),
            # `prepare` leaves a finished corpus as it is
            f"{file} was cut short or changed, is missing, or does not belong to its {MANIFEST}: "
            "delete its folder, then prepare the corpus again",
        )
    return manifest


# A file is read once per process, unless it changes: examples of several lengths share it.
_known_sha256 = cache(lambda file, _size, _modified: sha256(file))


@cache
def _mapped(file: Path, checksum: str) -> pa.Table:
    """Open a file once per process; its contents are read from the disk where they are used."""
    options = pa.ipc.IpcReadOptions(use_threads=False)  # a forked worker has none of its parent's
    return pa.ipc.open_file(pa.memory_map(str(file)), options=options).read_all()


class Passage(NamedTuple):
    """Consecutive sentences of a document, from `first` to before `last`.

    The sentences of the document begin and end at `bounds`.
    """

    document: int
    tokens: Any
    bounds: Any
    first: int
    last: int

    def between(self, first: int, last: int) -> Any:
        """Return the tokens of sentences of the document, which may lie outside of the passage."""
        return self.tokens[self.bounds[first] : self.bounds[last]]


class Corpus:
    """The examples of one length in the training or held-out documents of a corpus.

    A corpus that is not complete, or a file of it that has changed, is refused. `side` is `TRAIN`
    or `HELD_OUT`.
    """

    def __init__(self, folder: Path, side: str, length: int) -> None:
        self.folder, self.side, self.length = folder, side, length
        manifest = open_manifest(folder, (TOKENIZER, side))
        require(
            length in manifest["lengths"],
            f"{folder} was prepared for examples of {', '.join(map(str, manifest['lengths']))} "
            f"tokens, not {length}: choose one of them, or prepare it with --seq-len {length}",
        )
        self.tokenizer_checksum: str = manifest["sha256"][TOKENIZER]
        self.checksum: str = manifest["sha256"][side]
        examples = _mapped(folder / side, self.checksum)[str(length)]
        # They count the examples up to the end of each document.
        self._ends = np.cumsum(pc.list_value_length(examples).to_numpy())
        require(len(self) > 0, f"{folder} has no examples in {side}: prepare a larger corpus")

    def __len__(self) -> int:
        """Return the number of examples."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def passage(self, example: int) -> Passage:
        """Read the text of an example, by its number from 0."""
        document = int(np.searchsorted(self._ends, example, side="right"))
        table = _mapped(self.folder / self.side, self.checksum)
        examples, tokens, ends = (
            table[name][document].values for name in (str(self.length), "tokens", "ends")
        )
        first, last = examples[example - self._ends[document]].as_py()
        bounds = np.concatenate([[0], ends.to_numpy()])
        return Passage(document, tokens.to_numpy(), bounds, first, last)


def write_documents(
    file: Path, documents: Iterable[tuple[str, int]], tokenizer: Any, lengths: Sequence[int]
) -> dict[str, int]:
    """Encode documents, each a text with a sentence a line and its size; count what is written."""
    # A batch of rows holds the documents of `UNIT` bytes of source text, and empty ones count too.
    tokenizer.encode_special_tokens = True  # a "[SEP]" that stands in a text is text
    ids = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    schema = pa.schema(
        {
            "tokens": pa.list_(pa.from_numpy_dtype(ids)),
            "ends": pa.list_(pa.int32()),
            **dict.fromkeys(map(str, lengths), pa.list_(pa.list_(pa.int32(), 2))),
        }
    )
    totals, rows, gathered = Counter[str](), list[dict[str, Any]](), 0
    with whole_file(file) as path, pa.ipc.new_file(str(path), schema) as writer:
        for text, size in chain(documents, [("", UNIT)]):
            if text:
                encoded = tokenizer.encode_batch_fast(text.split("\n"), add_special_tokens=False)
                sentences = [encoding.ids for encoding in encoded if encoding.ids]
                tokens = np.array([token for sentence in sentences for token in sentence], ids)
                ends = np.cumsum([len(sentence) for sentence in sentences], dtype=np.int32)
                examples = {str(length): spans(ends.tolist(), length) for length in lengths}
                rows.append({"tokens": tokens, "ends": ends, **examples})
                totals.update(
                    {"documents": 1, "sentences": len(ends), "tokens": len(tokens)}
                    | {f"examples of {key}": len(ranges) for key, ranges in examples.items()}
                )
            gathered += size
            if gathered >= UNIT:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
                rows, gathered = [], 0
    return dict(totals)


def spans(ends: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Divide sentences, by their ends in tokens, into examples: pairs (first, last exclusive)."""
    # An example ends with the sentence that fills it, so it usually has more tokens than fit, as in
    # the code of Devlin et al. (2019); what does not fit is cut off when the example is made. It
    # has two sentences or more, so that it can be split into a pair of segments; a last sentence
    # that is left alone is joined by the one before it, in both.
    room, examples = length - SPECIAL_TOKENS, []
    first = begin = 0
    for number, end in enumerate(ends):
        if end - begin >= room and number > first:
            examples.append((first, number + 1))
            first, begin = number + 1, end
    if first < len(ends):
        examples.append((max(0, min(first, len(ends) - 2)), len(ends)))
    return examples
