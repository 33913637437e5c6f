"""Pairs and masks: functions of (seed, epoch, example), with the shares that BERT has."""

import pickle
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console

from dumps import dump, small_units, write_dump
from torch_thor.training import UserError
from torch_thor.training.data import EvaluationOrder, Shard, TrainingOrder, Workers
from torch_thor.training.text import (
    Corpus,
    Masking,
    PairLoader,
    PairMaker,
    Preparation,
    Settings,
    load_tokenizer,
    prepare,
)
from torch_thor.training.text.pairs import IGNORED

LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        wiki = write_dump(out / "wiki.xml", dump(120))
        settings = Settings(vocab_size=150, lengths=(32, LENGTH), held_out=0.1)
        prepare(Preparation((str(wiki),), out / "corpus", settings), Console(file=StringIO()))
    return out / "corpus"


@pytest.fixture(scope="module")
def corpus(folder):
    return Corpus(folder, "train", LENGTH)


def examples(maker, epochs=4):
    return [maker.example(n, 0, epoch) for epoch in range(epochs) for n in range(len(maker.corpus))]


def restored(example):
    """The tokens before they were masked."""
    labels = example["labels"]
    return np.where(labels >= 0, labels, example["input_ids"])


def test_an_example_is_a_function_of_seed_epoch_and_number(corpus):
    one, other = PairMaker(corpus, Masking()), PairMaker(corpus, Masking())
    for number in (0, 7, len(corpus) - 1):
        a, b = one.example(number, 3, 2), other.example(number, 3, 2)
        assert all(np.array_equal(a[key], b[key]) for key in a)
        for changed in ((4, 2), (3, 1)):
            assert not np.array_equal(a["input_ids"], one.example(number, *changed)["input_ids"])


def test_masks_have_the_shares_of_bert(corpus):
    maker = PairMaker(corpus, Masking())
    found = examples(maker)
    special = {maker.pad, maker.begin, maker.end}
    masked = same = total = 0
    for one in found:
        chosen = one["labels"] >= 0
        assert not set(restored(one)[chosen]) & special
        candidates = sum(int(token) not in special for token in restored(one))
        assert chosen.sum() == max(1, round(0.15 * candidates))
        masked += (one["input_ids"][chosen] == maker.mask).sum()
        same += (one["input_ids"][chosen] == one["labels"][chosen]).sum()
        total += chosen.sum()
        assert (one["labels"][~chosen] == IGNORED).all()
    assert masked / total == pytest.approx(0.8, abs=0.02)
    assert same / total == pytest.approx(0.1, abs=0.02)


def test_whole_words_are_masked_together(corpus):
    maker = PairMaker(corpus, Masking(whole_words=True))
    names = {number: piece for piece, number in corpus.tokenizer().get_vocab().items()}
    shares, cut_words = [], 0
    for one in examples(maker, 2):
        tokens, chosen = restored(one), one["labels"] >= 0
        words, word, before = [], -1, None
        for token in tokens:  # a pair that was shortened may begin inside a word
            word += not names[int(token)].startswith("##") or before in (maker.begin, maker.end)
            words.append(word)
            before = token
        words = np.array(words)
        for word in set(words[chosen]):
            assert chosen[words == word].all()
            cut_words += (words == word).sum() > 1
        candidates = sum(int(token) not in (maker.pad, maker.begin, maker.end) for token in tokens)
        shares.append(chosen.sum() / candidates)
    assert cut_words > 10
    assert np.mean(shares) == pytest.approx(0.14, abs=0.02)


def test_half_of_the_pairs_are_of_another_document(corpus):
    maker = PairMaker(corpus, Masking())
    several = [n for n in range(len(corpus)) if len(corpus.sentences(n)) > 1]
    labels = [int(maker.example(n, 0, epoch)["next_sentence_label"]) for epoch in range(8) for n in several]
    assert np.mean(labels) == pytest.approx(0.5, abs=0.06)
    for number in several[:20]:
        one = maker.example(number, 0, 0)
        tokens, kinds = restored(one), one["token_type_ids"]
        first, second = tokens[kinds == 0], tokens[kinds == 1]
        first = first[first != maker.pad]
        assert (first[0], first[-1], second[-1]) == (maker.begin, maker.end, maker.end)
        own = np.concatenate(corpus.sentences(number))
        text = np.concatenate([first[1:-1], second[:-1]])
        if one["next_sentence_label"] == 0:
            assert np.array_equal(text, own[: len(text)]) or len(own) > LENGTH - 3  # B follows A
        assert one["attention_mask"].sum() == len(first) + len(second)


def test_a_pair_that_is_too_long_is_shortened_to_fit(corpus):
    for one in examples(PairMaker(corpus, Masking()), 2):
        assert len(one["input_ids"]) == LENGTH
        length = one["attention_mask"].sum()
        assert (one["attention_mask"][:length] == 1).all()
        assert length <= LENGTH


def test_single_runs_of_sentences(corpus):
    maker = PairMaker(corpus, Masking(), pairs=False)
    one = maker.example(0, 0, 0)
    assert not one["token_type_ids"].any()
    own = np.concatenate(corpus.sentences(0))
    assert np.array_equal(restored(one)[1 : 1 + len(own)], own[: LENGTH - 2])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_batches_of_one_process_and_a_resumed_run_goes_on(corpus, ranks):
    maker = PairMaker(corpus, Masking())

    def batches(rank, world, epoch=1, start=0):
        order = TrainingOrder(len(corpus), 8, 5, Shard(rank, world))
        return list(PairLoader(maker, order, 5, torch.device("cpu")).batches(epoch, start))

    whole = batches(0, 1)
    parts = [batches(rank, ranks) for rank in range(ranks)]
    for n, batch in enumerate(whole):
        for key, value in batch.items():
            assert torch.cat([part[n][key] for part in parts]).equal(value)
    rest = batches(0, 1, start=3)
    assert all(a[key].equal(b[key]) for a, b in zip(rest, whole[3:], strict=True) for key in a)


@pytest.mark.parametrize("count", [1, 2])
def test_worker_processes_make_the_same_batches(corpus, count):
    maker, order = PairMaker(corpus, Masking()), TrainingOrder(len(corpus), 8, 5)
    plain = PairLoader(maker, order, 5, torch.device("cpu"))
    several = PairLoader(maker, order, 5, torch.device("cpu"), workers=Workers(count=count))
    for epoch, start in ((0, 0), (1, 3)):  # one iteration after the other, as a stream asks for them
        wanted, found = list(plain.batches(epoch, start)), list(several.batches(epoch, start))
        assert len(found) == order.batches - start
        assert all(a[key].equal(b[key]) for a, b in zip(found, wanted, strict=True) for key in a)


def test_the_examples_of_an_evaluation_are_the_same_in_each_epoch_and_may_be_none(corpus):
    maker = PairMaker(corpus, Masking())
    loader = PairLoader(maker, EvaluationOrder(3, 2, Shard(1, 4)), 0, torch.device("cpu"), fixed=True)
    first, again = (list(loader.batches(epoch)) for epoch in (0, 4))
    assert all(a[key].equal(b[key]) for a, b in zip(first, again, strict=True) for key in a)
    last = list(PairLoader(maker, EvaluationOrder(3, 2, Shard(0, 4)), 0, torch.device("cpu")))
    assert [tuple(batch["labels"].shape) for batch in [*first, *last]] == [(1, LENGTH), (0, LENGTH)]


def test_a_corpus_goes_to_another_process(corpus):
    one, other = PairMaker(corpus, Masking()), pickle.loads(pickle.dumps(PairMaker(corpus, Masking())))
    a, b = one.example(3, 1, 2), other.example(3, 1, 2)
    assert all(np.array_equal(a[key], b[key]) for key in a)


def test_every_example_can_be_read_whatever_its_shard(folder):
    for side in ("train", "held-out"):
        corpus = Corpus(folder, side, 32)
        documents = [corpus.document(n) for n in range(len(corpus))]
        assert documents == sorted(documents)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        assert all(tokenizer.decode(corpus.sentences(n)[0]) for n in range(len(corpus)))


def test_a_length_that_was_not_prepared_is_refused(folder):
    with pytest.raises(UserError, match="was prepared for examples of 32, 64 tokens, not 128"):
        Corpus(folder, "train", 128)
