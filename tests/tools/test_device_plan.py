"""`torch-thor plan`: its numbers against the optimizer, a measured step and the ring."""

import json

import pytest
import torch
from rich.console import Console

from torch_thor.errors import UserError
from torch_thor.tools import device_plan as module
from torch_thor.tools.device_plan import measure, plan, recipe_of, subject_of, times_of
from torch_thor.training.precision import Precision

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(300, 130), nn.ReLU(), nn.Linear(130, 10))

def timed():
    return build(), (torch.randn(4, 300), torch.randint(10, (4,)))

def own_loss():
    batch = {"input": torch.randn(6, 5)}, torch.zeros(6, 3)
    return nn.Linear(5, 3), batch, nn.functional.mse_loss
"""
MEASURED = {"device": "a device", "batch": 4, "ordinary": 1.0, "refresh": 7.0, "inverting": 4.0}


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return lambda function: f"{tmp_path / 'mine.py'}:{function}"


@pytest.fixture
def console():
    return Console(width=200, record=True)


def test_what_is_kept_and_sent(mine, console, tmp_path):
    """Blocks of 128, 128, 44 (A), 128, 2 (G), 128, 2 (A) and 10 (G)."""
    options = {"devices": (1, 2, 5, 8), "shards": 2, "out": tmp_path, "optimizer": "thor"}
    rows = plan(mine("build"), console, **options)
    divided = [(form, count) for form in ("ddp", "fsdp") for count in (2, 5, 8)]
    found = [(row["form"], row["devices"]) for row in rows]
    assert found == [("ddp", 1), *divided, ("hsdp", 8)]
    single, two, *_ = rows
    weights = 4 * (301 * 130 + 131 * 10)
    factors = 4 * 2 * (300 * 128 + 130 * 128 + 130 * 128 + 10 * 10)
    assert (single["sent"], single["rounds"], single["most_work"]) == (0, 0, 1)
    assert (single["curvature"], single["memory"]) == (factors, 3 * weights + factors)
    assert (two["sent"], two["rounds"], two["rounds_more"]) == (weights, 2, 6)
    assert json.loads((tmp_path / "plan.json").read_text())["rows"] == rows
    assert "thor: 2 layers with curvature, 40,440 parameters" in console.export_text()
    (row,) = plan(mine("build"), console, devices=(1,))  # for ThorMuon: only blocks of A
    assert row["curvature"] == 4 * 2 * (300 * 128 + 130 * 128)


def test_times_are_those_of_the_measured_step_and_a_ring():
    row = {"devices": 2, "rounds": 3, "rounds_more": 2, "sent": 8e9, "sent_more": 4e9}
    found = times_of({**row, "most_work": 1.5}, MEASURED, 4.0, 1e6, samples=79, every=5)
    network, more = 3 + 2, 2 + 1
    step, refresh = 1 + network, 7 - (1 - 0.75) * 4 + network + more
    training = 8 * step + 2 * refresh  # in steps 0 and 5 of 10
    assert found == {"step": step, "network": network, "refresh": refresh, "training": training}


def test_times_are_printed_and_stored(monkeypatch, mine, console, tmp_path):
    monkeypatch.setattr(module, "measure", lambda *_: MEASURED)
    (row,) = plan(mine("timed"), console, devices=(1,), batch=4, samples=4000, out=tmp_path)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["measured"], found["rows"]) == (MEASURED, [row])
    assert f"{row['training'] / 60:,.2f} │" in console.export_text()


@pytest.mark.filterwarnings("ignore:.*preconditions")
@pytest.mark.parametrize("name", ["digits", "bert-tiny"])
def test_recipes_need_no_data_and_words_set_their_keys(console, name):
    (row,), (same,), (other,) = (
        plan(name, console, devices=(1,), **options)
        for options in ({"words": ["split_dim=16"]}, {"split_dim": 16}, {"split_dim": 8})
    )
    assert row == same
    assert row["curvature"] > other["curvature"]


@pytest.mark.filterwarnings("ignore:.*preconditions")
@pytest.mark.parametrize(("word", "batch"), [("own_loss", 6), ("bert-tiny", 2), ("digits", 3)])
def test_a_step_is_measured(mine, word, batch):
    """With the batch of the user's function, or a random batch."""
    word = mine(word) if word == "own_loss" else word
    precision = Precision("fp16" if word == "digits" else "fp32", None, torch.device("cpu"))
    subject = subject_of(word, recipe_of(word, ()), min(batch, 3))
    found = measure(subject, "thor-muon", {"split_dim": 4}, precision)
    assert found["batch"] == batch
    assert found["ordinary"] > 0
    assert 0 <= found["inverting"] <= max(0.0, found["refresh"] - found["ordinary"])


@pytest.mark.parametrize(
    ("subject", "options", "said"),
    [
        ("characters", {}, "model=char-transformer is not a network"),
        ("build", {"batch": 2}, "returned only a model, and its times are to be measured: return"),
    ],
)
def test_bad_input(mine, console, subject, options, said):
    subject = mine(subject) if subject == "build" else subject
    with pytest.raises(UserError, match=said):
        plan(subject, console, **options)
