"""Training examples for BERT: pairs of text segments with masked tokens, drawn at random in each epoch.

The random choices depend only on the seed, the epoch and the index of the example. A resumed run and a run with any
number of processes therefore produce the same examples. Pairs follow Devlin et al. (2019, section 3.1): an example is
split into segments A and B at the end of a sentence, and in half of the examples B is taken from another document. By
default, 15 % of the tokens are predicted: 80 % of these are replaced by [MASK], 10 % by a random word piece, and 10 %
are left unchanged.
"""

from dataclasses import dataclass
from typing import Any

from torch_thor.training.errors import require
from torch_thor.training.text.corpus import Corpus
from torch_thor.training.text.encoding import SPECIAL_TOKENS
from torch_thor.training.text.wordpiece import CLASS, CONTINUES, MASK, PAD, SEPARATOR, SPECIAL

IGNORED = -100  # the label of tokens that are not predicted: the default ignore_index of torch's cross-entropy
_TRIES = 10  # maximum number of attempts to draw an example of another document


@dataclass(frozen=True)
class Masking:
    """How tokens are masked.

    Args:
        share: The fraction of the tokens that are predicted.
        whole_words: Whether all word pieces of a word are masked together.
    """

    share: float = 0.15
    whole_words: bool = False


class PairMaker:
    """Makes training examples from a corpus.

    Args:
        corpus: The corpus.
        masking: How tokens are masked.
        pairs: Whether an example is a pair of segments, the second of which may be from another document. If False, an
            example is a single segment, as for RoBERTa.

    Raises:
        UserError: If whole words are to be masked, and the tokenizer does not mark pieces that continue a word.
    """

    def __init__(self, corpus: Corpus, masking: Masking, *, pairs: bool = True) -> None:
        import numpy as np

        self.corpus, self.masking, self.pairs = corpus, masking, pairs
        tokenizer = corpus.tokenizer()
        pieces = tokenizer.get_vocab()
        self.pad, self.begin, self.end, self.mask = (pieces[one] for one in (PAD, CLASS, SEPARATOR, MASK))
        self.vocab_size = tokenizer.get_vocab_size()
        special = {pieces[one] for one in SPECIAL}
        self._ordinary = np.array([n for n in range(self.vocab_size) if n not in special], np.int64)
        self._continues = np.zeros(self.vocab_size, bool)
        self._continues[[number for piece, number in pieces.items() if piece.startswith(CONTINUES)]] = True
        require(
            not masking.whole_words or bool(self._continues.any()),
            f"data.text.whole_words=true: the tokenizer of {corpus.folder} has no pieces that begin with {CONTINUES}, "
            f"so that words cannot be recognised; set it to false, or prepare the corpus with a WordPiece tokenizer",
        )

    def example(self, number: int, seed: int, epoch: int) -> dict[str, Any]:
        """Make an example.

        Args:
            number: The index of the example, counted from 0.
            seed: The seed of the run.
            epoch: The index of the epoch, counted from 0.

        Returns:
            The int64 arrays `input_ids`, `token_type_ids`, `attention_mask` and `labels` (-100 for tokens that are not
            predicted), each of shape `(length,)`; and the scalar `next_sentence_label`, which is 0 if B follows A and 1
            if B is from another document, as in transformers.
        """
        import numpy as np

        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, number))))
        room = self.corpus.length - SPECIAL_TOKENS
        first, second, is_random = self._halves(number, random, room)
        tokens = [self.begin, *first, self.end]
        kinds = [0] * len(tokens)
        if self.pairs:
            tokens += [*second, self.end]
            kinds += [1] * (len(second) + 1)
        ids = np.full(self.corpus.length, self.pad, np.int64)
        ids[: len(tokens)] = tokens
        types = np.zeros_like(ids)
        types[: len(kinds)] = kinds
        attended = np.zeros_like(ids)
        attended[: len(tokens)] = 1
        labels = self._mask(ids, len(tokens), random)
        return {
            "input_ids": ids,
            "token_type_ids": types,
            "attention_mask": attended,
            "labels": labels,
            "next_sentence_label": np.int64(is_random),
        }

    def _halves(self, number: int, random: Any, room: int) -> tuple[Any, Any, bool]:
        """Return the tokens of A and B, shortened to fit into the example, and whether B is from another document."""
        import numpy as np

        sentences = self.corpus.sentences(number)
        if not self.pairs:
            return np.concatenate(sentences)[: room + 1], sentences[0][:0], False
        cut = int(random.integers(1, len(sentences))) if len(sentences) > 1 else 1
        first, second = np.concatenate(sentences[:cut]), sentences[cut:]
        is_random = len(sentences) == 1 or bool(random.random() < 0.5)
        other = self._other(number, random) if is_random else None
        if other is not None:
            start = int(random.integers(len(other)))
            second = other[start:]
        rest = np.concatenate(second) if second else first[:0]
        first, rest = _shortened(first, rest, room, random)
        return first, rest, other is not None

    def _other(self, number: int, random: Any) -> list[Any] | None:
        """Return the sentences of a random example of another document, or None if no attempt found one."""
        own = self.corpus.document(number)
        for _ in range(_TRIES):
            found = int(random.integers(len(self.corpus)))
            if self.corpus.document(found) != own:
                return self.corpus.sentences(found)
        return None

    def _mask(self, ids: Any, length: int, random: Any) -> Any:
        """Mask tokens of `ids` in place, and return the labels."""
        import numpy as np

        labels = np.full_like(ids, IGNORED)
        places = np.flatnonzero((ids != self.begin) & (ids != self.end) & (np.arange(len(ids)) < length))
        count = max(1, round(self.masking.share * len(places)))
        if self.masking.whole_words:
            continues = self._continues[ids[places]]
            continues[1:] &= np.diff(places) == 1  # a word does not continue after [SEP]
            words = np.cumsum(~continues)
            order = np.argsort(random.permutation(words[-1] + 1)[words], kind="stable")
            chosen = places[order][: self._whole(words[order], count)]
        else:
            chosen = random.permutation(places)[:count]
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        ids[chosen[fate < 0.8]] = self.mask
        replaced = chosen[(fate >= 0.8) & (fate < 0.9)]
        ids[replaced] = self._ordinary[random.integers(len(self._ordinary), size=len(replaced))]
        return labels

    @staticmethod
    def _whole(words: Any, count: int) -> int:
        """Return the number of leading tokens, at most `count`, that form whole words; at least the first word."""
        import numpy as np

        ends = np.flatnonzero(np.append(words[1:] != words[:-1], True)) + 1
        fitting = ends[ends <= count]
        return int(fitting[-1] if len(fitting) else ends[0])


def _shortened(first: Any, second: Any, room: int, random: Any) -> tuple[Any, Any]:
    """Cut tokens from the beginning or the end of the longer segment until both fit into `room` tokens."""
    excess = len(first) + len(second) - room
    while excess > 0:
        longer = first if len(first) > len(second) else second
        cut = min(excess, max(1, abs(len(first) - len(second))))
        longer = longer[cut:] if random.random() < 0.5 else longer[:-cut]
        if len(first) > len(second):
            first = longer
        else:
            second = longer
        excess = len(first) + len(second) - room
    return first, second
