"""Training examples for BERT: pairs of text segments with masked tokens, random in each epoch.

The draws depend only on the seed, the epoch and the number of the example. Pairs follow Devlin et
al. (2019, section 3.1): an example is split into segments A and B at the end of a sentence, and in
half of the examples B is replaced by text of another document that is as long. The lengths of the
segments therefore tell nothing about the label. Of the tokens to predict, 80 % are replaced by
[MASK], 10 % by a random word piece, and 10 % are left unchanged.
"""

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torch_thor.errors import require
from torch_thor.training.text.corpus import SPECIAL_TOKENS, Corpus, Passage
from torch_thor.training.text.wordpiece import (
    CLASS,
    CONTINUES,
    MASK,
    PAD,
    SEPARATOR,
    SPECIAL,
    load_tokenizer,
)

# the label of tokens that are not predicted: the default ignore_index of torch's cross-entropy
IGNORED = -100
_TRIES = 10  # maximum number of attempts to find another document that is long enough


class PairMaker(Dataset[dict[str, Any]]):
    """Makes training examples from a corpus.

    Args:
        corpus: The corpus.
        masked: The fraction of the tokens that are predicted.
        whole_words: Whether all word pieces of a word are masked together.
        pairs: Whether an example is a pair of segments, or a single segment, as for RoBERTa.
        seed: The seed of the run.
    """

    def __init__(
        self,
        corpus: Corpus,
        masked: float = 0.15,
        *,
        whole_words: bool = False,
        pairs: bool = True,
        seed: int = 0,
    ) -> None:
        self.corpus, self.masked, self.whole_words = corpus, masked, whole_words
        self.pairs, self.seed = pairs, seed
        self.pieces = load_tokenizer(corpus.tokenizer).get_vocab()
        self._ordinary = np.array(
            sorted({*self.pieces.values()} - {self.pieces[piece] for piece in SPECIAL})
        )
        self._continue = [number for piece, number in self.pieces.items() if piece[:2] == CONTINUES]
        require(
            not whole_words or self._continue != [],
            f"data.text.whole_words=true: {corpus.tokenizer} has no pieces that begin with "
            f"{CONTINUES}, so that words cannot be recognised; set it to false, or prepare the "
            "corpus with a WordPiece tokenizer",
        )

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        """Make an example of an epoch, by their numbers from 0, as int64 arrays."""
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *key))))
        first, second, is_random = self._segments(
            key[1], random, self.corpus.length - SPECIAL_TOKENS
        )
        begin, end = [self.pieces[CLASS]], [self.pieces[SEPARATOR]]
        first, second = [*begin, *first, *end], [*second, *end] if self.pairs else []
        padding = self.corpus.length - len(first) - len(second)
        ids = np.array([*first, *second, *padding * [self.pieces[PAD]]], np.int64)
        labels = self._mask(ids, random)
        return {
            "input_ids": ids,
            "token_type_ids": np.repeat([0, 1, 0], [len(first), len(second), padding]),
            "attention_mask": np.repeat([1, 0], [len(first) + len(second), padding]),
            "labels": labels,
            "masked": (labels >= 0).sum(),
            "next_sentence_label": np.int64(is_random),  # 1 if B is from another document
        }

    def _segments(self, number: int, random: Any, room: int) -> tuple[Any, Any, bool]:
        """Return A's and B's tokens, cut to the example, and whether B is of another document."""
        passage = self.corpus.passage(number)
        if not self.pairs:
            tokens = passage.between(passage.first, passage.last)
            return _window(tokens, room + 1, random), tokens[:0], False  # one [SEP] less
        sentences = passage.last - passage.first
        cut = passage.first + (int(random.integers(1, sentences)) if sentences > 1 else 1)
        first, second = passage.between(passage.first, cut), passage.between(cut, passage.last)
        if random.random() < 0.5 or sentences == 1:  # after a single sentence nothing follows
            wanted = len(second) or len(first)
            other = self._of_another_document(passage, len(first), wanted, random, room)
            if other is not None:
                return *_shortened(first, other, room, random), True
        return *_shortened(first, second, room, random), False

    def _of_another_document(
        self, passage: Passage, first: int, second: int, random: Any, room: int
    ) -> Any | None:
        """Return whole sentences of another random document for B, or None if no try found enough.

        A has `first` tokens, the B that is replaced `second`, and there is room for `room`
        together.
        """
        fills = first + second >= room
        wanted = max(1, room - first) if fills else second
        for _ in range(_TRIES):
            other = self.corpus.passage(int(random.integers(len(self.corpus))))
            last_start = (
                int(np.searchsorted(other.bounds, other.bounds[-1] - wanted, side="right")) - 1
            )
            if other.document == passage.document or last_start < 0:
                continue
            start = min(int(random.integers(other.first, other.last)), last_start)
            end = other.bounds[start] + wanted
            stop = int(np.searchsorted(other.bounds, end))  # of the sentence that reaches `end`
            before = end - other.bounds[stop - 1] < other.bounds[stop] - end
            # The end before it is taken if it is closer: B must be as long as what it replaces.
            return other.between(start, stop - (not fills and stop - 1 > start and before))
        return None

    def _mask(self, ids: Any, random: Any) -> Any:
        """Mask tokens of `ids` in place, and return the labels."""
        labels = np.full_like(ids, IGNORED)
        others = [self.pieces[piece] for piece in (PAD, CLASS, SEPARATOR)]
        places = np.flatnonzero(~np.isin(ids, others))
        count = max(1, round(self.masked * len(places)))
        if self.whole_words:
            continues = np.isin(ids[places], self._continue)
            continues[1:] &= np.diff(places) == 1  # a word does not continue after [SEP]
            words = np.cumsum(~continues)
            order = np.argsort(random.permutation(words[-1] + 1)[words], kind="stable")
            ends = np.flatnonzero(np.append(np.diff(words[order]) != 0, True)) + 1  # of whole words
            fitting = ends[ends <= count]
            chosen = places[order][: fitting[-1] if len(fitting) else ends[0]]
        else:
            chosen = random.permutation(places)[:count]
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        ids[chosen[fate < 0.8]] = self.pieces[MASK]
        replaced = chosen[(fate >= 0.8) & (fate < 0.9)]
        ids[replaced] = self._ordinary[random.integers(len(self._ordinary), size=len(replaced))]
        return labels


def _shortened(first: Any, second: Any, room: int, random: Any) -> tuple[Any, Any]:
    """Cut the longer segment, or both to one length, until together they fit into `room` tokens."""
    kept = min(len(first), max(room - len(second), (room + 1) // 2))
    return _window(first, kept, random), _window(second, room - kept, random)


def _window(tokens: Any, length: int, random: Any) -> Any:
    """Return up to `length` consecutive tokens from a random position, so all are seen in time."""
    start = int(random.integers(max(0, len(tokens) - length) + 1))
    return tokens[start : start + length]
