"""Random access to the examples of a prepared corpus, whose files are memory-mapped."""

import bisect
import itertools
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch_thor.training.errors import require
from torch_thor.training.text.arrow_files import read_table
from torch_thor.training.text.manifest import TOKENIZER, Manifest
from torch_thor.training.text.wordpiece import load_tokenizer

_OPEN_SHARDS = 64  # a mapped file uses address space and a file descriptor, but little memory


@dataclass(frozen=True)
class Passage:
    """Consecutive sentences of a document.

    Args:
        document: The unique identifier of the document: the index of its shard, and its index within the shard.
        tokens: The token ids of the whole document, an integer array of shape `(tokens,)`.
        bounds: The offset in `tokens` at which each sentence of the document begins, and the end of the last one; an
            integer array of shape `(sentences + 1,)`.
        first: The index of the first sentence of the passage.
        last: The index after its last sentence.
    """

    document: tuple[int, int]
    tokens: Any
    bounds: Any
    first: int
    last: int

    def between(self, first: int, last: int) -> Any:
        """Return the tokens of sentences of the document, which may lie outside of the passage.

        Args:
            first: The index of the first sentence.
            last: The index after the last sentence.

        Returns:
            An integer array of shape `(tokens,)`.
        """
        return self.tokens[self.bounds[first] : self.bounds[last]]


class Corpus:
    """The examples of one length in one side (training or held-out) of a corpus.

    Args:
        folder: The folder of a prepared corpus.
        side: `train` or `held-out`.
        length: Number of tokens per example, including special tokens; one of the lengths that the corpus was prepared
            for.

    Raises:
        UserError: If the folder is not a complete corpus, one of the files of the side and length has changed, or there
            are no such examples.
    """

    def __init__(self, folder: Path, side: str, length: int) -> None:
        manifest = Manifest.read(folder)
        lengths = manifest.settings.lengths
        require(
            length in lengths,
            f"{folder} was prepared for examples of {', '.join(map(str, lengths))} tokens, not {length}: choose one of "
            f"them, or prepare it with --seq-len {length}",
        )
        self.folder, self.side, self.length, self.manifest = folder, side, length, manifest
        self._names = [shard.name for shard in manifest.side(side)]
        counts = [shard.examples[length] for shard in manifest.side(side)]
        self._firsts = list(itertools.accumulate(counts, initial=0))
        self._open = lru_cache(_OPEN_SHARDS)(self._map)
        require(len(self) > 0, f"{folder} has no {side} examples: prepare a larger corpus")
        files = [f"{name}{end}" for name in self._names for end in (".arrow", f".{length}.arrow")]
        manifest.check_files(folder, [TOKENIZER, *files])

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._firsts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_open"}  # each process maps its own files

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = lru_cache(_OPEN_SHARDS)(self._map)

    def tokenizer(self) -> Any:
        """Load the tokenizer of the corpus.

        Returns:
            A `tokenizers.Tokenizer`.
        """
        return load_tokenizer(self.folder / TOKENIZER)

    def passage(self, example: int) -> Passage:
        """Read the text of an example.

        Args:
            example: The index of the example, counted from 0.

        Returns:
            The sentences of the example, within their document.
        """
        import numpy as np

        shard = bisect.bisect_right(self._firsts, example) - 1
        tokens, token_starts, ends, end_starts, rows = self._open(self._names[shard])
        document, first, last = (int(value) for value in rows[example - self._firsts[shard]])
        own = tokens[token_starts[document] : token_starts[document + 1]]
        bounds = np.concatenate([[0], ends[end_starts[document] : end_starts[document + 1]]])
        return Passage((shard, document), own, bounds, first, last)

    def _map(self, name: str) -> tuple[Any, ...]:
        import numpy as np

        table = read_table(self.folder / f"{name}.arrow").combine_chunks()
        found: list[Any] = []
        for column in ("tokens", "ends"):
            lists = table[column].chunk(0)
            found += [lists.values.to_numpy(), lists.offsets.to_numpy()]
        examples = read_table(self.folder / f"{name}.{self.length}.arrow")
        rows = np.stack([examples[key].to_numpy() for key in ("document", "first", "last")], axis=1)
        return (*found, rows)
