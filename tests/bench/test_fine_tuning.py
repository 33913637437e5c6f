"""The fine-tuning benchmark: modules are held out, only the weights of the two starts differ, and learning is seen."""

import importlib
import random
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, BertTokenizerFast

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORDS = ["apple", "bread", "cherry", "dates", "eggs", "flour", "grapes", "honey", "juice", "kale", "lemon", "milk"]


@pytest.fixture
def tuning(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fine_tuning")


@pytest.fixture
def library(tmp_path):
    """Eighty modules with sentences whose words are in the order of the alphabet, and a package of tests."""
    draw = random.Random(0)
    for module in range(80):
        sentences = [" ".join(sorted(draw.sample(WORDS, 7))).capitalize() + "." for _ in range(4)]
        (tmp_path / f"m{module}.py").write_text(f'"""{" ".join(sentences)}"""\ndef f():\n    """Too short."""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test/m.py").write_text('"""A sentence of tests, which is left out of everything."""\n')
    return tmp_path


@pytest.fixture
def bert(tmp_path):
    """A network with weights that no seed draws, as `torch-thor export` writes it."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    tokenizer = BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)})
    tokenizer.save_pretrained(tmp_path / "bert")
    torch.manual_seed(99)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertForPreTraining(BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_whole_modules_are_held_out_and_half_of_the_sentences_are_changed(tuning, library):
    train, test = tuning.read_task(library)
    assert len(train.texts) + len(test.texts) <= 320
    assert not {" ".join(sorted(text.lower().split())) for text in train.texts} & set(test.texts)
    for side, least in ((train, 100), (test, 10)):
        assert len(side.texts) >= least
        assert sum(side.labels) / len(side.labels) == pytest.approx(0.5, abs=0.2)
        for text, label in zip(side.texts, side.labels, strict=True):
            words = text.lower().replace(".", "").split()
            assert (words != sorted(words)) == label
            exchanged = [n for n in range(6) if words[n] > words[n + 1]]
            assert len(exchanged) == label  # two neighbours, and nothing else
    few, _ = tuning.read_task(library, examples=30)
    assert len(few.texts) == len(few.labels) == 30


def test_a_network_is_fine_tuned_and_the_starts_differ(tuning, bert):
    draw = random.Random(1)
    train, test = tuning.Sentences(), tuning.Sentences()
    for number in range(320):  # easier than word order: whether the sentence names an animal's product
        side = test if number % 5 == 0 else train
        words = draw.sample(WORDS, 3)
        side.texts.append(" ".join(words))
        side.labels.append(int("milk" in words or "eggs" in words or "honey" in words))
    found = {start: tuning.fine_tune(bert, start, 5e-3, 0, train, test) for start in tuning.STARTS}
    assert found["pretrained"]["losses"][0] != found["random"]["losses"][0]
    for run in found.values():
        assert len(run["losses"]) == tuning.EPOCHS * (256 // tuning.BATCH_SIZE)
    assert max(run["accuracy"] for run in found.values()) > 0.8
    assert found == {start: tuning.fine_tune(bert, start, 5e-3, 0, train, test) for start in tuning.STARTS}


def test_the_table_has_each_seed(tuning):
    runs = [
        {"start": start, "lr": 1e-3, "seed": seed, "accuracy": accuracy + seed / 10}
        for start, accuracy in (("pretrained", 0.5), ("random", 0.3))
        for seed in (0, 1)
    ]
    assert "| pretrained | 0.001 | 0.550 | 0.500, 0.600 |" in tuning.text_of(runs)
    assert "| random | 0.001 | 0.350 | 0.300, 0.400 |" in tuning.text_of(runs)
