"""Word counts of a text, on which a tokenizer is trained.

The number of distinct words grows with the size of the text, but most of them occur only once. The rarest words are
dropped repeatedly, so that the memory use does not depend on the size of the text.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch_thor.training.text.cleaning import sentences_of
from torch_thor.training.text.wordpiece import LONGEST_WORD, new_tokenizer

# The largest number of distinct words that a tokenizer is trained on. The library's trainer needs about 700 bytes for
# each. In a gigabyte of English text, the remaining words occur in the order of 100 times each at most, and the rarest
# of 30,522 word pieces in the order of 1000 times.
MOST_WORDS = 120_000


@dataclass
class WordCounts:
    """Word and character counts, to which the counts of further texts can be added.

    Args:
        words: The number of occurrences of each word. For large texts, only the more frequent words are kept.
        characters: The number of occurrences of each character.
    """

    words: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)

    def add(self, other: "PackedCounts") -> None:
        """Add the counts of another text. If words are dropped, the result depends on the order of the texts.

        Args:
            other: The counts of the other text.
        """
        for word, count in zip(other.words.split(), other.counts, strict=True):
            self.words[word] += count
        self.characters.update(other.characters)
        if len(self.words) > 2 * MOST_WORDS:
            kept = most_frequent(self.words, 3 * MOST_WORDS // 2)
            self.words.clear()  # before the update, so that the two tables are never in memory together
            dict.update(self.words, kept)


@dataclass(frozen=True)
class PackedCounts:
    """The counts of a work unit in a compact form, which needs about a tenth of the memory of `WordCounts`.

    Args:
        words: The words, separated by spaces. Words do not contain spaces.
        counts: The number of occurrences of each word, in the same order.
        characters: The number of occurrences of each character.
    """

    words: str
    counts: "array[int]"
    characters: Counter[str]

    @classmethod
    def of(cls, counts: WordCounts) -> "PackedCounts":
        """Convert counts to the compact form.

        Args:
            counts: The counts.

        Returns:
            The counts in the compact form.
        """
        return cls(" ".join(counts.words), array("q", counts.words.values()), counts.characters)


def count_words(sentences: Iterable[str], lowercase: bool) -> WordCounts:
    """Count the words of a text, as BERT's pre-tokeniser separates them.

    Args:
        sentences: The sentences of the text. Spaces are their only white space.
        lowercase: Whether words are converted to lower case and accents are removed.

    Returns:
        The counts, without the words that are too long for the tokenizer.
    """
    tokenizer = new_tokenizer(lowercase)
    written: Counter[str] = Counter()
    for sentence in sentences:
        written.update(sentence.split())
    found = WordCounts()
    for text, count in written.items():  # each text once, since words never extend across spaces
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)):
            if len(word) <= LONGEST_WORD:
                found.words[word] += count
    for word, count in found.words.items():
        for character in word:
            found.characters[character] += count
    return found


def count_unit(folder: Path, number: int, share: float, seed: int, lowercase: bool) -> "PackedCounts":
    """Count the words of a cleaned unit.

    Args:
        folder: The folder with the output of the cleaning stage.
        number: The number of the unit, counted from 0.
        share: The fraction of the documents to count.
        seed: The seed that determines which documents are counted.
        lowercase: Whether words are converted to lower case and accents are removed.

    Returns:
        The counts.
    """
    return PackedCounts.of(count_words(sentences_of(folder, number, share, seed), lowercase))


def most_frequent(counts: Counter[str], most: int) -> list[tuple[str, int]]:
    """Choose the most frequent words. Ties are resolved in the order of the words' code points.

    Args:
        counts: The number of occurrences of each word.
        most: The largest number of words to choose.

    Returns:
        The words and their counts, in no particular order.
    """
    if len(counts) <= most:
        return list(counts.items())
    least = sorted(counts.values(), reverse=True)[most]
    chosen = [(word, count) for word, count in counts.items() if count > least]
    tied = sorted(word for word, count in counts.items() if count == least)
    return chosen + [(word, least) for word in tied[: most - len(chosen)]]
