"""A prepared corpus: its files, and random access to its examples, which are mapped into memory.

`train.arrow` and `held-out.arrow` have one document per row. `tokens` are the ids of all its
sentences, and `ends` the end of each sentence in `tokens`. The column with the name of a length
holds the examples of that length: the first and last (exclusive) sentences, whose tokens fill an
example together with [CLS] and two [SEP].
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch_thor.errors import require

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


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


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
        import numpy as np

        unit = bisect_right(self._firsts, example) - 1
        batch, number = self._file.get_batch(unit), example - self._firsts[unit]
        examples = batch[str(self.length)]
        document = int(np.searchsorted(examples.offsets.to_numpy(), number, side="right")) - 1
        first, last = examples.values.values.to_numpy()[2 * number : 2 * number + 2].tolist()
        tokens, ends = (_row(batch[name], document) for name in ("tokens", "ends"))
        return Passage((unit, document), tokens, np.concatenate([[0], ends]), first, last)


def mapped(file: Path) -> Any:
    """Open an Arrow file, whose contents are read from the disk where they are used."""
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False)  # a forked worker has none of its parent's
    return pa.ipc.open_file(pa.memory_map(str(file)), options=options)


def _row(lists: Any, row: int) -> Any:
    """Return a row of an Arrow array of lists as a NumPy array, without a copy."""
    begin, end = lists.offsets.to_numpy()[row : row + 2]
    return lists.values.to_numpy()[begin:end]
