"""A prepared corpus: its files, how they are written, and random access to its examples.

`train.arrow` and `held-out.arrow` have one document per row, and are mapped into memory. `tokens`
are the ids of all its sentences, and `ends` the end of each sentence in `tokens`. The column with
the name of a length holds the examples of that length: the first and last (exclusive) sentences,
whose tokens fill an example together with [CLS] and two [SEP].
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torch_thor.errors import require

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
TRAIN, HELD_OUT = "train.arrow", "held-out.arrow"
FORMAT = 4  # of the manifest and the files
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
ROWS = 1000  # documents that are written together


@cache
def _mapped(file: Path) -> pa.Table:
    """Open a file once per process; its contents are read from the disk where they are used."""
    # a forked worker has none of its parent's threads
    one_thread = pa.ipc.IpcReadOptions(use_threads=False)
    return pa.ipc.open_file(pa.memory_map(str(file)), options=one_thread).read_all()


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

    `side` is `TRAIN` or `HELD_OUT`.
    """

    def __init__(self, folder: Path, side: str, length: int) -> None:
        require(
            (folder / MANIFEST).is_file(),
            f"{folder} is no prepared corpus (no {MANIFEST}): make it with torch-thor prepare",
        )
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        require(
            length in manifest["lengths"],
            f"{folder} was prepared for examples of {', '.join(map(str, manifest['lengths']))} "
            f"tokens, not {length}: choose one of them, or prepare it with --seq-len {length}",
        )
        self.tokenizer, self.file, self.length = folder / TOKENIZER, folder / side, length
        self.checksums: dict[str, str] = manifest["sha256"]  # by the names of the files
        # They count the examples up to the end of each document.
        self._ends = np.cumsum(pc.list_value_length(_mapped(self.file)[str(length)]).to_numpy())

    def __len__(self) -> int:
        """Return the number of examples."""
        return int(self._ends[-1])

    def passage(self, example: int) -> Passage:
        """Read the text of an example, by its number from 0."""
        document, table = int(np.searchsorted(self._ends, example, "right")), _mapped(self.file)
        examples = table[str(self.length)][document].values
        first, last = examples[example - self._ends[document]].as_py()
        bounds = np.concatenate([[0], table["ends"][document].values.to_numpy()])
        return Passage(document, table["tokens"][document].values.to_numpy(), bounds, first, last)


def write_documents(
    file: Path, documents: Iterator[str], tokenizer: Any, lengths: Sequence[int]
) -> dict[str, int]:
    """Encode documents, each a text with a sentence a line, and count what is written."""
    tokenizer.encode_special_tokens = True  # a "[SEP]" that stands in a text is text
    ids = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    schema = pa.schema(
        {
            "tokens": pa.list_(pa.from_numpy_dtype(ids)),
            "ends": pa.list_(pa.int32()),
            **dict.fromkeys(map(str, lengths), pa.list_(pa.list_(pa.int32(), 2))),
        }
    )
    with pa.ipc.new_file(str(file), schema) as writer:
        while rows := [_row(text, tokenizer, ids, lengths) for text in islice(documents, ROWS)]:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    table = _mapped(file)
    columns = {"tokens": "tokens", "ends": "sentences"}
    columns |= {str(length): f"examples of {length}" for length in lengths}
    return {"documents": table.num_rows} | {
        title: pc.sum(pc.list_value_length(table[name])).as_py() for name, title in columns.items()
    }


def _row(text: str, tokenizer: Any, ids: Any, lengths: Sequence[int]) -> dict[str, Any]:
    encoded = tokenizer.encode_batch_fast(text.split("\n"), add_special_tokens=False)
    sentences = [encoding.ids for encoding in encoded if encoding.ids]
    tokens = np.array([token for sentence in sentences for token in sentence], ids)
    ends = np.cumsum([len(sentence) for sentence in sentences], dtype=np.int32)
    examples = {str(length): spans(ends.tolist(), length) for length in lengths}
    return {"tokens": tokens, "ends": ends, **examples}


def spans(ends: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Divide sentences, by their ends in tokens, into examples: pairs (first, last exclusive)."""
    # An example ends with the sentence that fills it, so it usually has more tokens than fit, as in
    # the code of Devlin et al. (2019); what does not fit is cut off when the example is made. It
    # has two sentences or more, so that it can be split into a pair of segments; a last sentence
    # that is left over is joined by the sentence before it, in both.
    room, examples = length - SPECIAL_TOKENS, []
    first = begin = 0
    for number, end in enumerate(ends):
        if end - begin >= room and number > first:
            examples.append((first, number + 1))
            first, begin = number + 1, end
    if first < len(ends):
        examples.append((max(0, min(first, len(ends) - 2)), len(ends)))
    return examples
