"""A prepared corpus: its files, how they are written, and random access to its examples.

They are mapped into memory.

`train.arrow` and `held-out.arrow` have one document per row. `tokens` are the ids of all its
sentences, and `ends` the end of each sentence in `tokens`. The column with the name of a length
holds the examples of that length: the first and last (exclusive) sentences, whose tokens fill an
example together with [CLS] and two [SEP].
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torch_thor.errors import require
from torch_thor.files import sha256, whole_file
from torch_thor.training.text.wordpiece import load_tokenizer

MANIFEST, TOKENIZER, TRAIN, HELD_OUT = (
    "manifest.json",
    "tokenizer.json",
    "train.arrow",
    "held-out.arrow",
)
FORMAT = 4  # of the manifest and the files
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
# `prepare` leaves a finished corpus as it is
_AGAIN = "delete its folder, then prepare the corpus again"


@cache
def _known_sha256(file: Path, size: int, modified: int) -> str:
    """Read a file once per process: examples of several lengths share it."""
    return sha256(file)


def open_manifest(
    folder: Path, names: Sequence[str] = (TOKENIZER, TRAIN, HELD_OUT)
) -> dict[str, Any]:
    """Read a corpus's manifest, and refuse the corpus if a file is missing or has changed."""
    file = folder / MANIFEST
    require(
        file.is_file(),
        f"{folder} is no prepared corpus (no {MANIFEST}): make one with torch-thor prepare",
    )
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        expected = (
            {name: manifest["sha256"][name] for name in names}
            if manifest["format"] == FORMAT
            else {MANIFEST: ""}
        )
    except (ValueError, KeyError, TypeError):
        expected = {MANIFEST: ""}
    for name, digest in expected.items():
        require((folder / name).is_file(), f"{folder / name} is missing: {_AGAIN}")
        found = (folder / name).stat()
        require(
            _known_sha256(folder / name, found.st_size, found.st_mtime_ns) == digest,
            f"{folder / name} was cut short or changed, or is of another version: {_AGAIN}",
        )
    return manifest


@dataclass(frozen=True)
class Passage:
    """Consecutive sentences of a document, from `first` to before `last`.

    The sentences of the document begin and end at `bounds`.
    """

    document: tuple[int, int]
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
        lengths = manifest["lengths"]
        require(
            length in lengths,
            f"{folder} was prepared for examples of {', '.join(map(str, lengths))} tokens, not "
            f"{length}: choose one of them, or prepare it with --seq-len {length}",
        )
        self.tokenizer_checksum: str = manifest["sha256"][TOKENIZER]
        self.checksum: str = manifest["sha256"][side]
        batches = map(self._file.get_batch, range(self._file.num_record_batches))
        self._firsts = list(
            accumulate((len(batch[str(length)].values) for batch in batches), initial=0)
        )
        require(len(self) > 0, f"{folder} has no examples in {side}: prepare a larger corpus")

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._firsts[-1]

    def __getstate__(self) -> dict[str, Any]:
        # each process maps its own file
        return {key: value for key, value in vars(self).items() if key != "_file"}

    @cached_property
    def _file(self) -> Any:
        return mapped(self.folder / self.side)

    def passage(self, example: int) -> Passage:
        """Read the text of an example, by its number from 0."""
        unit = bisect_right(self._firsts, example) - 1
        batch, number = self._file.get_batch(unit), example - self._firsts[unit]
        examples = batch[str(self.length)]
        document = int(np.searchsorted(examples.offsets.to_numpy(), number, side="right")) - 1
        first, last = examples.values.values.to_numpy()[2 * number : 2 * number + 2].tolist()
        tokens, ends = (_row(batch[name], document) for name in ("tokens", "ends"))
        return Passage((unit, document), tokens, np.concatenate([[0], ends]), first, last)


def mapped(file: Path) -> Any:
    """Open an Arrow file, whose contents are read from the disk where they are used."""
    options = pa.ipc.IpcReadOptions(use_threads=False)  # a forked worker has none of its parent's
    return pa.ipc.open_file(pa.memory_map(str(file)), options=options)


def _row(lists: Any, row: int) -> Any:
    """Return a row of an Arrow array of lists as a NumPy array, without a copy."""
    begin, end = lists.offsets.to_numpy()[row : row + 2]
    return lists.values.to_numpy()[begin:end]


def write_corpus(
    documents: Iterable[dict[str, Any]],
    folder: Path,
    lengths: Sequence[int],
    is_held_out: Callable[[str], bool],
) -> dict[str, dict[str, int]]:
    """Encode documents, which have sentences, as the files of a corpus; return what these hold."""
    # the documents of a unit become a batch of rows in each file
    tokenizer = load_tokenizer(folder / TOKENIZER)
    tokenizer.encode_special_tokens = True  # a "[SEP]" that stands in a text is text
    ids = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    types = {"tokens": pa.list_(pa.from_numpy_dtype(ids)), "ends": pa.list_(pa.int32())}
    spans_type = pa.list_(pa.list_(pa.int32(), 2))
    schema = pa.schema(types | {str(length): spans_type for length in lengths})
    totals = {side: Counter[str]() for side in (TRAIN, HELD_OUT)}
    with ExitStack() as stack:
        paths = {side: stack.enter_context(whole_file(folder / side)) for side in totals}
        writers = {
            side: stack.enter_context(pa.ipc.new_file(str(path), schema))
            for side, path in paths.items()
        }
        for _, unit in groupby(documents, itemgetter("unit")):
            rows: dict[str, list[dict[str, Any]]] = {side: [] for side in totals}
            for document in unit:
                encoded = tokenizer.encode_batch_fast(
                    document["sentences"], add_special_tokens=False
                )
                sentences = [one.ids for one in encoded if one.ids]
                ends = np.cumsum([len(one) for one in sentences], dtype=np.int32)
                tokens = np.array([token for one in sentences for token in one], ids)
                side = HELD_OUT if is_held_out(document["name"]) else TRAIN
                examples = {str(length): spans(ends.tolist(), length) for length in lengths}
                rows[side].append({"tokens": tokens, "ends": ends, **examples})
                counted = {"documents": 1, "sentences": len(ends), "tokens": len(tokens)}
                totals[side].update(
                    counted | {f"examples of {key}": len(one) for key, one in examples.items()}
                )
            for side, own in rows.items():
                writers[side].write_batch(pa.RecordBatch.from_pylist(own, schema))
    return {side: dict(counted) for side, counted in totals.items()}


def spans(ends: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Divide a document into examples, each a (first, last exclusive) pair of sentences."""
    # `ends` are those of its sentences, in tokens.
    # An example ends with the sentence that fills it, so it usually has more tokens than fit, as in
    # the code of Devlin et al. (2019); what does not fit is cut off when the example is made. It
    # has two sentences or more, so that it can be split into a pair of segments; a last sentence
    # that is left alone is joined by the one before it, in both.
    room, found = length - SPECIAL_TOKENS, []
    first = begin = 0
    for number, end in enumerate(ends):
        if end - begin >= room and number > first:
            found.append((first, number + 1))
            first, begin = number + 1, end
    if first < len(ends):
        alone = len(ends) - first == 1
        found.append((max(0, first - 1) if alone else first, len(ends)))
    return found
