"""The fine-tuning benchmark: modules are held out, only the weights of the two starts differ, and learning is seen."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, BertTokenizerFast

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
VERBS = {"taken": "from", "sent": "to"}  # the word before the gap determines the preposition


@pytest.fixture
def tuning(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fine_tuning")


@pytest.fixture
def library(tmp_path):
    """Thirty modules with three sentences each, of which two are in no other module, and tests that are left out."""
    (tmp_path / "lib" / "test").mkdir(parents=True)
    for number, verb in enumerate(list(VERBS) * 15):
        text = f"Value {number} is {verb} {VERBS[verb]} this box. A box {number} is {verb} {VERBS[verb]} it. "
        text += "This is common to all boxes."
        (tmp_path / "lib" / f"m{number}.py").write_text(f'"""{text}"""\ndef f():\n    """Short."""\n')
    (tmp_path / "lib" / "test" / "m.py").write_text('"""This sentence is of a test and is left out."""\n')
    return tmp_path / "lib"


@pytest.fixture
def bert(tmp_path):
    """A network with weights that no seed draws, as `torch-thor export` writes it."""
    words = "value a box this is taken sent full from to of it common all boxes . 1 2 3"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()]
    tokenizer = BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)})
    tokenizer.save_pretrained(tmp_path / "bert")
    torch.manual_seed(99)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertForPreTraining(BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def whole(tuning, gap):
    return f"{gap.before} {tuning.PREPOSITIONS[gap.label]} {gap.after}"


def test_whole_modules_are_held_out_and_no_sentence_is_in_both(tuning, library):
    train, test = tuning.read_task(library)
    sides = [{whole(tuning, gap) for gap in side} for side in (train, test)]
    assert not sides[0] & sides[1]
    assert len(train) == len(sides[0])  # each sentence once
    common = "This is common to all boxes."
    assert len((sides[0] | sides[1]) - {common}) == 60
    modules = [{word for text in side for word in text.split() if word.isdigit()} for side in sides]
    assert not modules[0] & modules[1]
    assert all(modules)
    assert not any("left out" in text for side in sides for text in side)


def test_number_of_sentences(tuning, library, monkeypatch):
    everything, _ = tuning.read_task(library)
    monkeypatch.setattr(tuning, "EXAMPLES", 7)
    few, _ = tuning.read_task(library)
    assert few == everything[:7]


def test_only_sentences_with_a_preposition_and_of_the_right_length_are_drawn(tuning):
    wanted = "It is sent to them by nobody."
    (gap,) = tuning.draw(["Sent to it.", "to " * 30, "This has no gap which one can fill.", wanted], 9)
    assert whole(tuning, gap) == wanted
    assert tuning.PREPOSITIONS[gap.label] in ("to", "by")


def test_the_label_is_at_the_mask_token(tuning, bert):
    tokenizer = BertTokenizerFast.from_pretrained(bert)
    gaps = [tuning.Gap("this box is", "it", 4), tuning.Gap("a", "box is full .", 7), tuning.Gap("it " * 70, "box", 2)]
    inputs, labels = tuning.encode(tokenizer, gaps)
    assert inputs["input_ids"].shape == labels.shape == (3, tuning.LENGTH)
    assert (labels != tuning.IGNORED).nonzero().tolist() == [[0, 4], [1, 2]]  # the third one is cut off
    assert [labels[0, 4], labels[1, 2]] == [4, 7]
    assert tokenizer.decode(inputs["input_ids"][1, :4]) == "[CLS] a [MASK] box"


def test_a_network_is_fine_tuned_and_the_starts_differ(tuning, library, bert, monkeypatch):
    monkeypatch.setattr(tuning, "BATCH_SIZE", 4)
    monkeypatch.setattr(tuning, "EPOCHS", 8)
    monkeypatch.setattr(tuning, "LENGTH", 16)
    train, test = tuning.read_task(library)
    found = {start: tuning.fine_tune(bert, start, 1e-2, 0, train, test) for start in tuning.STARTS}
    assert found["pretrained"]["losses"][0] != found["random"]["losses"][0]
    for run in found.values():
        assert len(run["losses"]) == tuning.EPOCHS * (len(train) // 4)
        assert run["accuracy"] > 0.8
    assert found["random"] == tuning.fine_tune(bert, "random", 1e-2, 0, train, test)
    wrong = [replace(gap, label=sum(map(tuning.PREPOSITIONS.index, VERBS.values())) - gap.label) for gap in test]
    assert tuning.fine_tune(bert, "random", 1e-2, 0, train, wrong)["accuracy"] < 0.2


def test_the_table_has_each_seed(tuning):
    runs = [
        {"start": start, "lr": 1e-3, "seed": seed, "accuracy": accuracy + seed / 10}
        for start, accuracy in (("pretrained", 0.5), ("random", 0.3))
        for seed in (0, 1)
    ]
    assert "| pretrained | 0.001 | 0.550 | 0.500, 0.600 |" in tuning.text_of(runs)
    assert "| random | 0.001 | 0.350 | 0.300, 0.400 |" in tuning.text_of(runs)
