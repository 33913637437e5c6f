"""`torch-thor plan`: its numbers are those of the optimizer, and bad input gets one line."""

import json

import pytest

from command_line import call

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(300, 130), nn.ReLU(), nn.Linear(130, 10))

def timed():
    return build(), (torch.randn(4, 300), torch.randint(10, (4,)))

def frozen():
    return build().requires_grad_(False)
"""


def test_command(monkeypatch, capsys, tmp_path):
    file, out = tmp_path / "mine.py", tmp_path / "plan"
    file.write_text(MODEL)
    words = (f"{file}:build", "--world-size", "1,4", "--split-dim", "64", "--optimizer", "thor-muon", "--out", out)
    code, printed, _ = call(monkeypatch, capsys, "plan", *words)
    assert code == 0
    assert "2 preconditioned layers" in " ".join(printed.split())
    found = json.loads((out / "plan.json").read_text())
    assert [share["processes"] for share in found["shares"]] == [1, 4]
    assert (found["split_dim"], found["optimizer"]) == (64, "thor-muon")


def test_times_from_costs_of_this_device_and_of_a_file(monkeypatch, capsys, tmp_path):
    file, out, costs = tmp_path / "mine.py", tmp_path / "plan", tmp_path / "costs.json"
    file.write_text(MODEL)
    words = (f"{file}:timed", "--world-size", "1,4", "--split-dim", "64")
    code, printed, _ = call(monkeypatch, capsys, "plan", *words, "--save-costs", costs, "--local-batch", "4")
    assert code == 0
    assert "Predicted" not in printed
    again = ("--costs", costs, "--batch", "64", "--samples", "640", "--fsdp", "--interconnect", "1GB/s@5us")
    code, printed, _ = call(monkeypatch, capsys, "plan", *words, *again, "--out", out)
    assert code == 0
    assert "Predicted, not measured: the batch that" in " ".join(printed.split())
    found = json.loads((out / "plan.json").read_text())
    assert [(one["form"], one["processes"]) for one in found["times"]] == [
        ("DDP", 1),
        ("DDP", 4),
        ("FSDP2", 1),
        ("FSDP2", 4),
    ]
    assert found["costs"] == json.loads(costs.read_text())
    assert found["interconnect"]["inside"] == {"bandwidth": 1e9, "latency": pytest.approx(5e-6)}
    assert [one["processes"] for one in found["sharded"]] == [1, 4]
    assert (out / "plan.png").stat().st_size
    code, _, told = call(monkeypatch, capsys, "plan", *words[:-1], "32", *again)
    assert code == 2
    assert "measured with split_dim=64, and this plan has 32" in " ".join(told.split())


@pytest.mark.parametrize("size", ["bert-tiny", "resnet18"])
def test_models_by_name(monkeypatch, capsys, size):
    code, printed, _ = call(monkeypatch, capsys, "plan", size, "--world-size", "8")
    assert code == 0
    assert f"{size}:" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet18", "--world-size", "0,2"), "--world-size=0,2: must be whole numbers of at least 1"),
        (("resnet18", "--world-size", "two"), "--world-size=two: must be whole numbers"),
        (("resnet18", "--optimizer", "sgd"), "--optimizer=sgd: must be thor or thor-muon"),
        (("resnet18", "--interconnect", "wire"), "--interconnect=wire: must be LINK"),
        (("resnet18", "--batch", "64"), "--batch=64: 1024 processes need at least as many samples"),
        (("resnet18", "--costs", "nowhere.json"), "--costs nowhere.json cannot be read"),
        (("FILE:build", "--batch", "2000"), "returned a model alone"),
        (("resnet5",), "did you mean resnet"),
        (("FILE:frozen",), "has no parameters to train"),
        (("FILE:nothing",), "failed: AttributeError"),
    ],
)
def test_bad_input(monkeypatch, capsys, tmp_path, words, message):
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    words = [word.replace("FILE", str(file)) for word in words]
    code, _, told = call(monkeypatch, capsys, "plan", *words)
    assert code == 2
    assert message in " ".join(told.split())
