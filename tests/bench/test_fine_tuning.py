"""The fine-tuning benchmark: modules are held out, only the weights of the two starts differ, and learning is seen."""

import importlib
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, BertTokenizerFast

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tuning(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fine_tuning")


@pytest.fixture
def library(tuning, monkeypatch, tmp_path):
    """Two packages of ten modules, whose docstrings have words of their own."""
    monkeypatch.setattr(tuning, "PACKAGES", ("fruit", "metal"))
    for package, words in (("fruit", "apple pear cherry plum"), ("metal", "iron copper zinc silver")):
        (tmp_path / package).mkdir()
        for module in range(10):
            paragraph = f"The {words} of module {module}."
            source = f'"""{paragraph}\n\nMany words that both of the packages have."""\ndef f():\n    """Short."""\n'
            (tmp_path / package / f"m{module}.py").write_text(source)
    return tmp_path


@pytest.fixture
def bert(tmp_path):
    """A network with weights that no seed draws, as `torch-thor export` writes it."""
    words = "the apple pear cherry plum iron copper zinc silver of module words both packages have"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()]
    tokenizer = BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)})
    tokenizer.save_pretrained(tmp_path / "bert")
    torch.manual_seed(99)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertForPreTraining(BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_whole_modules_are_held_out_and_no_paragraph_is_in_both(tuning, library):
    train, test = tuning.read_task(library)
    assert not set(train.texts) & set(test.texts)
    own = {text for text in (*train.texts, *test.texts) if text.startswith("The")}
    assert len(own) == 20  # of each module of each package one
    assert {text.split()[1] for text in own} == {"apple", "iron"}
    assert all((text.split()[1] == "iron") == label for text, label in zip(test.texts, test.labels, strict=True))
    few, _ = tuning.read_task(library, examples=3)
    assert [few.labels.count(label) for label in (0, 1)] == [3, 3]


def test_a_network_is_fine_tuned_and_the_starts_differ(tuning, library, bert, monkeypatch):
    monkeypatch.setattr(tuning, "BATCH_SIZE", 4)
    train, test = tuning.read_task(library)
    found = {start: tuning.fine_tune(bert, start, 5e-3, 0, train, test) for start in tuning.STARTS}
    assert found["pretrained"]["losses"][0] != found["random"]["losses"][0]
    for run in found.values():
        assert len(run["losses"]) == tuning.EPOCHS * (len(train.labels) // 4)
    assert found == {start: tuning.fine_tune(bert, start, 5e-3, 0, train, test) for start in tuning.STARTS}
    assert max(run["accuracy"] for run in found.values()) > 0.8


def test_the_table_has_each_seed(tuning):
    runs = [
        {"start": start, "lr": 1e-3, "seed": seed, "accuracy": accuracy + seed / 10}
        for start, accuracy in (("pretrained", 0.5), ("random", 0.3))
        for seed in (0, 1)
    ]
    assert "| pretrained | 0.001 | 0.550 | 0.500, 0.600 |" in tuning.text_of(runs)
    assert "| random | 0.001 | 0.350 | 0.300, 0.400 |" in tuning.text_of(runs)
