"""Pairs and masks: functions of (seed, epoch, example), with the shares that BERT has."""

import pickle

import numpy as np
import pytest

from articles import write_articles
from torch_thor.errors import UserError
from torch_thor.training.text import corpus as corpora
from torch_thor.training.text.corpus import TRAIN, Corpus
from torch_thor.training.text.pairs import IGNORED, PairMaker
from torch_thor.training.text.prepare import prepare

LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "ROWS", 7)  # so that a few articles are several batches of rows
        wiki = write_articles(out / "wiki", 120)
        prepare([str(wiki)], out / "corpus", vocab_size=150, lengths=[32, LENGTH], held_out=0.1)
    return out / "corpus"


@pytest.fixture(scope="module")
def corpus(folder):
    return Corpus(folder, TRAIN, LENGTH)


def examples(maker, epochs=4):
    return [maker[epoch, n] for epoch in range(epochs) for n in range(len(maker.corpus))]


def framing(maker):
    """The ids of [PAD], [CLS] and [SEP]."""
    return [maker.pieces[piece] for piece in ("[PAD]", "[CLS]", "[SEP]")]


def restored(example):
    """The tokens before they were masked."""
    labels = example["labels"]
    return np.where(labels >= 0, labels, example["input_ids"])


def test_an_example_depends_on_seed_epoch_and_number_only(corpus):
    maker = PairMaker(corpus, seed=3)
    copied = pickle.loads(pickle.dumps(maker))
    for number in (0, 7, len(corpus) - 1):
        a, b = maker[2, number], copied[2, number]
        assert all(np.array_equal(a[key], b[key]) for key in a)
        for changed in (PairMaker(corpus, seed=4)[2, number], maker[1, number]):
            assert not np.array_equal(a["input_ids"], changed["input_ids"])


def test_masks_and_pairs_have_the_shares_of_bert(corpus):
    maker = PairMaker(corpus)
    found = examples(maker, 8)
    masked = same = total = 0
    for example in found:
        chosen, length = example["labels"] >= 0, example["attention_mask"].sum()
        assert len(example["input_ids"]) == LENGTH
        assert example["attention_mask"][:length].all()
        ordinary = ~np.isin(restored(example), framing(maker))
        assert ordinary[chosen].all()
        assert chosen.sum() == max(1, round(0.15 * ordinary.sum()))
        assert (example["labels"][~chosen] == IGNORED).all()
        masked += (example["input_ids"][chosen] == maker.pieces["[MASK]"]).sum()
        same += (example["input_ids"][chosen] == example["labels"][chosen]).sum()
        total += chosen.sum()
    assert masked / total == pytest.approx(0.8, abs=0.02)
    assert same / total == pytest.approx(0.1, abs=0.02)
    random_pairs = [example["next_sentence_label"] for example in found]
    assert np.mean(random_pairs) == pytest.approx(0.5, abs=0.04)


def test_whole_words_are_masked_together(corpus):
    maker = PairMaker(corpus, whole_words=True)
    names = {number: piece for piece, number in maker.pieces.items()}
    shares, cut_words = [], 0
    for example in examples(maker, 2):
        tokens, chosen = restored(example), example["labels"] >= 0
        # a pair that was shortened may begin inside a word
        begins = [
            not names[int(token)].startswith("##") or before in framing(maker)
            for before, token in zip([None, *tokens[:-1]], tokens, strict=True)
        ]
        words = np.cumsum(begins)
        for word in set(words[chosen]):
            assert chosen[words == word].all()
            cut_words += (words == word).sum() > 1
        shares.append(chosen.sum() / (~np.isin(tokens, framing(maker))).sum())
    assert cut_words > 10
    assert np.mean(shares) == pytest.approx(0.14, abs=0.02)


def segments(maker, example):
    """The tokens of A and of B, without special tokens, before they were masked."""
    tokens, kinds = restored(example), example["token_type_ids"]
    first, second = tokens[(kinds == 0) & (example["attention_mask"] == 1)], tokens[kinds == 1]
    _, begin, end = framing(maker)
    assert (first[0], first[-1], second[-1]) == (begin, end, end)
    return first[1:-1], second[:-1]


def contains(whole, part):
    """Whether the list `part` is a slice of the list `whole`."""
    return any(whole[n : n + len(part)] == part for n in range(len(whole) - len(part) + 1))


def test_the_second_segment_follows_the_first_or_is_of_another_document(corpus):
    maker = PairMaker(corpus)
    for number, example in enumerate(examples(maker, 2)):
        passage = corpus.passage(number % len(corpus))
        first, second = (part.tolist() for part in segments(maker, example))
        follows = any(
            contains(passage.between(passage.first, n).tolist(), first)
            and contains(passage.between(n, passage.last).tolist(), second)
            for n in range(passage.first + 1, passage.last)
        )
        assert follows == (example["next_sentence_label"] == 0)


def test_lengths_do_not_tell_random_pairs_from_others(corpus):
    maker, sizes = PairMaker(corpus), {0: [], 1: []}
    for example in examples(maker, 8):
        first, second = map(len, segments(maker, example))
        sizes[int(example["next_sentence_label"])].append((first, second, first + second))
    for follows, random in zip(*(np.array(own).T for own in sizes.values()), strict=True):
        assert min(len(follows), len(random)) > 200
        # the probability that a random pair is longer; equal lengths count half
        longer, equal = random[:, None] > follows, random[:, None] == follows
        assert (longer + 0.5 * equal).mean() == pytest.approx(0.5, abs=0.05)


def test_single_runs_of_sentences(corpus):
    maker, passage, begins = PairMaker(corpus, pairs=False), corpus.passage(0), set()
    own = passage.between(passage.first, passage.last).tolist()
    for epoch in range(20):
        example = maker[epoch, 0]
        assert not example["token_type_ids"].any()
        found = restored(example)[1:-1].tolist()
        assert len(found) == LENGTH - 2
        begins.add(next(n for n in range(len(own)) if own[n : n + len(found)] == found))
    # the part that is cut off changes, so that every sentence is seen in time
    assert {0, len(own) - len(found)} <= begins


def test_a_length_that_was_not_prepared_is_refused(folder):
    with pytest.raises(UserError, match="was prepared for examples of 32, 64 tokens, not 128"):
        Corpus(folder, TRAIN, 128)
