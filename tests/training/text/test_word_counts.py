"""Words are counted as BERT's tokenizer separates them, within a bound; the counts give the tokenizer of the text."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import trainers

from dumps import plain
from torch_thor.training.text import word_counts, wordpiece
from torch_thor.training.text.word_counts import PackedCounts, WordCounts, count_words, most_frequent
from torch_thor.training.text.wordpiece import LONGEST_WORD, SPECIAL, new_tokenizer, train_tokenizer

TEXT = [plain(number) for number in range(30)]
WRITTEN = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=40)


@given(st.lists(WRITTEN, max_size=5), st.booleans())
def test_words_are_those_that_the_tokenizer_sees(sentences, lowercase):
    tokenizer, wanted = new_tokenizer(lowercase), Counter()
    for sentence in sentences:
        normal = tokenizer.normalizer.normalize_str(" ".join(sentence.split()))
        wanted.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    found = count_words(sentences, lowercase)
    assert found.words == wanted
    assert found.characters == Counter(character for word in wanted.elements() for character in word)


def test_a_word_that_is_too_long_for_the_tokenizer_is_left_out():
    assert count_words([f"{'a' * LONGEST_WORD} {'b' * (LONGEST_WORD + 1)}"], True).words == {"a" * LONGEST_WORD: 1}


def test_a_tokenizer_trained_on_counts_is_that_of_the_text():
    counts, size = count_words(TEXT, True), 150
    found = train_tokenizer(counts.words.items(), counts.characters, size, True)
    by_text = new_tokenizer(True)
    alphabet = sorted(counts.characters)
    fixed = [*SPECIAL, *alphabet, *(f"##{one}" for one in alphabet)]
    by_text.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=size, special_tokens=fixed))
    assert found.get_vocab() == by_text.get_vocab()
    assert found.get_vocab_size() == size


def test_a_word_with_a_character_outside_the_alphabet_is_not_trained_on(monkeypatch):
    monkeypatch.setattr(wordpiece, "ALPHABET", 2)
    words = [("ab", 50), ("abz", 1000)]
    found = train_tokenizer(words, {"a": 9, "b": 8, "z": 7}, 20, True)
    assert sorted(set(found.get_vocab()) - set(SPECIAL)) == ["##a", "##b", "a", "ab", "b"]


def test_rare_characters_leave_room_for_words_in_a_small_vocabulary():
    words = {"the": 1000, "then": 500, "this": 400}
    rare = {chr(0x4E00 + n): 1 for n in range(2000)}
    characters = Counter("".join(words)) + Counter({"h": 1000}) + Counter(rare)
    for vocab_size, letters in ((300, 128), (4096, 256), (30_522, 1000)):
        vocabulary = train_tokenizer([*words.items(), *rare.items()], characters, vocab_size, True).get_vocab()
        assert {"the", "then", "this"} <= set(vocabulary)
        assert sum(len(piece) == 1 for piece in vocabulary) == letters


def test_long_texts_are_trained_on_in_proportion(monkeypatch):
    monkeypatch.setattr(wordpiece, "OCCURRENCES", 1000)
    repeated = Counter(
        word for line in wordpiece._repeated([("a", 60_000), ("b", 39_999), ("c", 1)]) for word in line.split()
    )
    assert repeated == {"a": 600, "b": 400, "c": 1}
    monkeypatch.setattr(wordpiece, "OCCURRENCES", 100_000)
    repeated = Counter(
        word for line in wordpiece._repeated([("a", 60_000), ("b", 39_999), ("c", 1)]) for word in line.split()
    )
    assert repeated == {"a": 60_000, "b": 39_999, "c": 1}


@given(st.dictionaries(st.text("ab", max_size=5), st.integers(1, 4), max_size=30), st.integers(0, 12))
def test_the_most_frequent_words_are_chosen(counts, most):
    wanted = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:most]
    assert sorted(most_frequent(Counter(counts), most)) == sorted(wanted)


@pytest.mark.parametrize("most", [50, 1000])
def test_counts_are_bounded_and_frequent_words_are_counted_right(monkeypatch, most):
    monkeypatch.setattr(word_counts, "MOST_WORDS", most)
    total, largest = WordCounts(), 0
    for number in range(100):
        rare = {f"rare{number}-{n}": 1 for n in range(40)}
        total.add(PackedCounts.of(WordCounts(Counter({"often": 30, "usual": 10} | rare), Counter("oft"))))
        largest = max(largest, len(total.words))
    assert largest <= 2 * most
    assert dict(most_frequent(total.words, 2)) == {"often": 3000, "usual": 1000}
    assert total.characters == {"o": 100, "f": 100, "t": 100}
