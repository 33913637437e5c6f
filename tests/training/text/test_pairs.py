"""Pairs and masks: functions of (seed, epoch, example), with the shares that BERT has."""

import pickle

import numpy as np
import pytest

from articles import WORDS, write_articles
from torch_thor.errors import UserError
from torch_thor.training.text import corpus as corpora
from torch_thor.training.text.corpus import HELD_OUT, TRAIN, Corpus
from torch_thor.training.text.pairs import IGNORED, PairMaker
from torch_thor.training.text.prepare import prepare
from torch_thor.training.text.wordpiece import load_tokenizer

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


def test_an_example_is_a_function_of_seed_epoch_and_number_in_any_process(corpus):
    one = PairMaker(corpus, seed=3)
    other = pickle.loads(pickle.dumps(one))
    for number in (0, 7, len(corpus) - 1):
        a, b = one[2, number], other[2, number]
        assert all(np.array_equal(a[key], b[key]) for key in a)
        for changed in (PairMaker(corpus, seed=4)[2, number], one[1, number]):
            assert not np.array_equal(a["input_ids"], changed["input_ids"])


def test_masks_and_pairs_have_the_shares_of_bert_and_fit(corpus):
    maker = PairMaker(corpus)
    found = examples(maker, 8)
    masked = same = total = 0
    for one in found:
        chosen, length = one["labels"] >= 0, one["attention_mask"].sum()
        assert len(one["input_ids"]) == LENGTH
        assert one["attention_mask"][:length].all()
        ordinary = ~np.isin(restored(one), framing(maker))
        assert ordinary[chosen].all()
        assert chosen.sum() == max(1, round(0.15 * ordinary.sum()))
        assert (one["labels"][~chosen] == IGNORED).all()
        masked += (one["input_ids"][chosen] == maker.pieces["[MASK]"]).sum()
        same += (one["input_ids"][chosen] == one["labels"][chosen]).sum()
        total += chosen.sum()
    assert masked / total == pytest.approx(0.8, abs=0.02)
    assert same / total == pytest.approx(0.1, abs=0.02)
    assert np.mean([one["next_sentence_label"] for one in found]) == pytest.approx(0.5, abs=0.04)


def test_whole_words_are_masked_together(corpus):
    maker = PairMaker(corpus, whole_words=True)
    names = {number: piece for piece, number in maker.pieces.items()}
    shares, cut_words = [], 0
    for one in examples(maker, 2):
        tokens, chosen = restored(one), one["labels"] >= 0
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


def segments(maker, one):
    """The tokens of A and of B, without special tokens, before they were masked."""
    tokens, kinds = restored(one), one["token_type_ids"]
    first, second = tokens[(kinds == 0) & (one["attention_mask"] == 1)], tokens[kinds == 1]
    _, begin, end = framing(maker)
    assert (first[0], first[-1], second[-1]) == (begin, end, end)
    return first[1:-1], second[:-1]


def contains(whole, part):
    """Whether a list has another as a slice."""
    return any(whole[n : n + len(part)] == part for n in range(len(whole) - len(part) + 1))


def test_the_second_segment_follows_the_first_or_is_of_another_document(corpus):
    maker = PairMaker(corpus)
    for number, one in enumerate(examples(maker, 2)):
        passage = corpus.passage(number % len(corpus))
        first, second = (part.tolist() for part in segments(maker, one))
        follows = any(
            contains(passage.between(passage.first, n).tolist(), first)
            and contains(passage.between(n, passage.last).tolist(), second)
            for n in range(passage.first + 1, passage.last)
        )
        assert follows == (one["next_sentence_label"] == 0)


def ranks_above(a, b):
    """The probability that a value of `a` is above one of `b`; equal ones count half."""
    a, b = np.array(a)[:, None], np.array(b)[None]
    return ((a > b) + 0.5 * (a == b)).mean()


@pytest.mark.parametrize("length", [32, LENGTH])
def test_lengths_do_not_tell_random_pairs_from_others(folder, length):
    maker = PairMaker(Corpus(folder, TRAIN, length))
    sizes = {0: [], 1: []}
    for one in examples(maker, 8):
        first, second = map(len, segments(maker, one))
        sizes[int(one["next_sentence_label"])].append((first, second, first + second))
    assert min(map(len, sizes.values())) > 200
    for of_true, of_random in zip(*(np.array(own).T for own in sizes.values()), strict=True):
        assert ranks_above(of_random, of_true) == pytest.approx(0.5, abs=0.05)
        limits = np.unique([*of_true, *of_random])[:, None]
        above = (of_random >= limits).mean(1) - (of_true >= limits).mean(1)
        # the best rule "at least so long" is right for 0.5 + 0.06 at most
        assert np.abs(above).max() < 0.12


def test_in_short_documents_the_second_segment_is_about_as_long(tmp_path):
    draw = np.random.default_rng(0)
    for number in range(100):
        texts = (" ".join(draw.choice(WORDS, size)) for size in draw.integers(6, 20, 4))
        (tmp_path / f"{number:03}.txt").write_text(". ".join(map(str.capitalize, texts)) + ".")
    prepare([str(tmp_path)], tmp_path / "corpus", vocab_size=150, lengths=[128], held_out=0.01)
    maker, sizes = PairMaker(Corpus(tmp_path / "corpus", TRAIN, 128)), {0: [], 1: []}
    for one in examples(maker, 16):
        sizes[int(one["next_sentence_label"])].append(len(segments(maker, one)[1]))
    # whole sentences, so not exactly as long
    assert np.mean(sizes[1]) == pytest.approx(np.mean(sizes[0]), rel=0.12)
    assert ranks_above(sizes[1], sizes[0]) == pytest.approx(0.5, abs=0.07)


def test_a_document_of_one_sentence_gets_text_of_another(tmp_path):
    for number in range(30):
        words = np.random.default_rng(number).choice(WORDS, 9)
        (tmp_path / f"{number:02}.txt").write_text(" ".join(words).capitalize() + ".")
    prepare([str(tmp_path)], tmp_path / "corpus", vocab_size=100, lengths=[32], held_out=0.2)
    for one in examples(PairMaker(Corpus(tmp_path / "corpus", TRAIN, 32))):
        assert one["next_sentence_label"] == 1


def test_single_runs_of_sentences(corpus):
    maker, passage, begins = PairMaker(corpus, pairs=False), corpus.passage(0), set()
    own = passage.between(passage.first, passage.last).tolist()
    for epoch in range(20):
        one = maker[epoch, 0]
        assert not one["token_type_ids"].any()
        found = restored(one)[1:-1].tolist()
        assert len(found) == LENGTH - 2
        begins.add(next(n for n in range(len(own)) if own[n : n + len(found)] == found))
    # what is cut off changes, so that all is seen in time
    assert {0, len(own) - len(found)} <= begins


def test_every_example_can_be_read_whatever_its_shard(folder):
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    for side in (TRAIN, HELD_OUT):
        corpus = Corpus(folder, side, 32)
        passages = [corpus.passage(n) for n in range(len(corpus))]
        documents = [passage.document for passage in passages]
        assert documents == sorted(documents)
        assert all(tokenizer.decode(one.between(one.first, one.first + 1)) for one in passages)


def test_a_length_that_was_not_prepared_is_refused(folder):
    with pytest.raises(UserError, match="was prepared for examples of 32, 64 tokens, not 128"):
        Corpus(folder, TRAIN, 128)
