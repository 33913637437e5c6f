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
from torch_thor.training.text.corpus import SPECIAL_TOKENS, TOKENIZER, Corpus, Passage
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
        pairs: Whether an example is a pair of segments, or a single one, as for RoBERTa.
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
        self.corpus, self.masked, self.whole_words, self.pairs, self.seed = (
            corpus,
            masked,
            whole_words,
            pairs,
            seed,
        )
        pieces = load_tokenizer(corpus.folder / TOKENIZER).get_vocab()
        self.pad, self.begin, self.end, self.mask = (
            pieces[token] for token in (PAD, CLASS, SEPARATOR, MASK)
        )
        self.vocab_size = len(pieces)
        self._ordinary = np.array(
            sorted(number for piece, number in pieces.items() if piece not in SPECIAL), np.int64
        )
        self._continues = np.array(
            [piece.startswith(CONTINUES) for piece in sorted(pieces, key=pieces.__getitem__)]
        )
        require(
            not whole_words or bool(self._continues.any()),
            f"data.text.whole_words=true: the tokenizer of {corpus.folder} has no pieces that "
            f"begin with {CONTINUES}, so that words cannot be recognised; set it to false, or "
            "prepare the corpus with a WordPiece tokenizer",
        )

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        """Make an example of an epoch, by their numbers from 0, as int64 arrays."""
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *key))))
        first, second, is_random = self._segments(
            key[1], random, self.corpus.length - SPECIAL_TOKENS
        )
        tokens = [self.begin, *first, self.end, *([*second, self.end] if self.pairs else [])]
        ids = np.full(self.corpus.length, self.pad, np.int64)
        types, attended = np.zeros_like(ids), np.zeros_like(ids)
        ids[: len(tokens)], attended[: len(tokens)] = tokens, 1
        types[len(first) + 2 : len(tokens)] = 1
        labels = self._mask(ids, len(tokens), random)
        return {
            "input_ids": ids,
            "token_type_ids": types,
            "attention_mask": attended,
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
        other = None
        if random.random() < 0.5 or sentences == 1:  # after a single sentence nothing follows
            other = self._of_another_document(
                passage, len(first), len(second) or len(first), random, room
            )
        rest = second if other is None else other
        return *_shortened(first, rest, room, random), other is not None

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
            # It is the end of the sentence that reaches `wanted` tokens.
            stop = int(np.searchsorted(other.bounds, end))
            before = end - other.bounds[stop - 1] < other.bounds[stop] - end
            # The end before it is taken if it is closer: B must be as long as the one it replaces.
            return other.between(start, stop - (not fills and stop - 1 > start and before))
        return None

    def _mask(self, ids: Any, length: int, random: Any) -> Any:
        """Mask tokens of `ids` in place, and return the labels."""
        labels = np.full_like(ids, IGNORED)
        places = np.flatnonzero(
            (ids != self.begin) & (ids != self.end) & (np.arange(len(ids)) < length)
        )
        count = max(1, round(self.masked * len(places)))
        if self.whole_words:
            continues = self._continues[ids[places]]
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
        ids[chosen[fate < 0.8]] = self.mask
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
