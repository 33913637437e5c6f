"""Random access to the examples of a prepared corpus, whose files are memory-mapped."""

import bisect
import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch_thor.training.errors import require
from torch_thor.training.text.arrow_files import read_table
from torch_thor.training.text.manifest import TOKENIZER, Manifest
from torch_thor.training.text.wordpiece import load_tokenizer

_OPEN_SHARDS = 64  # a mapped file uses address space and a file descriptor, but little memory


class Corpus:
    """The examples of one length in one side (training or held-out) of a corpus.

    Args:
        folder: The folder of a prepared corpus.
        side: `train` or `held-out`.
        length: Number of tokens per example, including special tokens; one of the lengths that the corpus was prepared
            for.

    Raises:
        UserError: If the folder is not a complete corpus, or has no examples of that side and length.
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

    def sentences(self, example: int) -> list[Any]:
        """Read the sentences of an example.

        Args:
            example: The index of the example, counted from 0.

        Returns:
            The token ids of each sentence, as integer arrays of shape `(tokens,)`.
        """
        shard = bisect.bisect_right(self._firsts, example) - 1
        tokens, token_starts, ends, end_starts, rows = self._open(self._names[shard])
        document, first, last = rows[example - self._firsts[shard]]
        own = tokens[token_starts[document] : token_starts[document + 1]]
        own_ends = ends[end_starts[document] : end_starts[document + 1]]
        begins = [own_ends[first - 1] if first else 0, *own_ends[first : last - 1]]
        return [own[begin:end] for begin, end in zip(begins, own_ends[first:last], strict=True)]

    def document(self, example: int) -> tuple[int, int]:
        """Return the document that an example is from.

        Args:
            example: The index of the example, counted from 0.

        Returns:
            The unique identifier of the document: the index of its shard, and its index within the shard.
        """
        shard = bisect.bisect_right(self._firsts, example) - 1
        rows = self._open(self._names[shard])[-1]
        return shard, int(rows[example - self._firsts[shard]][0])

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
