"""How often each word occurs, which is all that the training of a tokenizer needs to know of a text.

A larger text has more distinct words, most of which occur once. They are dropped again and again, so that memory does
not depend on the size of the text.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch_thor.training.text.cleaning import sentences_of
from torch_thor.training.text.wordpiece import LONGEST_WORD, new_tokenizer

# Distinct words that a tokenizer is trained on: the library's trainer takes about 700 bytes for each. In a gigabyte of
# English the others occur less than some hundred times each, and the last of 30,522 word pieces some thousand times.
MOST_WORDS = 120_000


@dataclass
class WordCounts:
    """Counts that grow by those of other texts.

    Args:
        words: How often each word occurs; of large texts, the more frequent words alone.
        characters: How often each character occurs.
    """

    words: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)

    def add(self, other: "PackedCounts") -> None:
        """Add the counts of another text; the result depends on the order where there are more words than are kept.

        Args:
            other: Its counts.
        """
        for word, count in zip(other.words.split(), other.counts, strict=True):
            self.words[word] += count
        self.characters.update(other.characters)
        if len(self.words) > 2 * MOST_WORDS:
            kept = most_frequent(self.words, 3 * MOST_WORDS // 2)
            self.words.clear()  # first, so that there are never two tables
            dict.update(self.words, kept)


@dataclass(frozen=True)
class PackedCounts:
    """The counts of a unit while they wait to be added up, in a tenth of the memory.

    Args:
        words: Separated by blanks, which no word has.
        counts: Of the words, in the same order.
        characters: How often each character occurs.
    """

    words: str
    counts: "array[int]"
    characters: Counter[str]

    @classmethod
    def of(cls, counts: WordCounts) -> "PackedCounts":
        """Pack counts.

        Args:
            counts: The counts.

        Returns:
            The same, packed.
        """
        return cls(" ".join(counts.words), array("q", counts.words.values()), counts.characters)


def count_words(sentences: Iterable[str], lowercase: bool) -> WordCounts:
    """Count words as BERT's tokenizer separates them.

    Args:
        sentences: A text; white space is blanks.
        lowercase: Whether case and accents are dropped.

    Returns:
        The counts. Words that are too long for the tokenizer are left out.
    """
    tokenizer = new_tokenizer(lowercase)
    written: Counter[str] = Counter()
    for sentence in sentences:
        written.update(sentence.split())
    found = WordCounts()
    for text, count in written.items():  # each once: what separates words looks at no more than what blanks separate
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)):
            if len(word) <= LONGEST_WORD:
                found.words[word] += count
    for word, count in found.words.items():
        for character in word:
            found.characters[character] += count
    return found


def count_unit(folder: Path, number: int, share: float, seed: int, lowercase: bool) -> "PackedCounts":
    """Count the words of a unit that is cleaned.

    Args:
        folder: Of the first stage.
        number: The unit.
        share: Share of the documents to count.
        seed: Decides which.
        lowercase: Whether case and accents are dropped.

    Returns:
        The counts.
    """
    return PackedCounts.of(count_words(sentences_of(folder, number, share, seed), lowercase))


def most_frequent(counts: Counter[str], most: int) -> list[tuple[str, int]]:
    """Choose the most frequent words, and of equally frequent ones the first in the order of characters.

    Args:
        counts: How often each word occurs.
        most: How many to choose.

    Returns:
        Words and their counts, in no order.
    """
    if len(counts) <= most:
        return list(counts.items())
    least = sorted(counts.values(), reverse=True)[most]
    chosen = [(word, count) for word, count in counts.items() if count > least]
    tied = sorted(word for word, count in counts.items() if count == least)
    return chosen + [(word, least) for word in tied[: most - len(chosen)]]
