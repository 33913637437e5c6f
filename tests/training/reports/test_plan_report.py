"""`torch-thor plan`: its numbers are those of the optimizer, and bad input gets one line."""

import json

import pytest
import torch
from torch import nn

from command_line import call
from torch_thor import THOR
from torch_thor.training.reports.plan_report import curvature_of, share_of

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(300, 130), nn.ReLU(), nn.Linear(130, 10))

def frozen():
    return build().requires_grad_(False)
"""


def model():
    return nn.Sequential(nn.Linear(300, 130), nn.ReLU(), nn.Linear(130, 10))


def attention():
    """Three layers are rows of one weight."""
    return nn.TransformerEncoderLayer(300, 2, 20, batch_first=True)


@pytest.mark.parametrize("make", [model, attention])
def test_the_size_of_the_state_is_that_of_an_optimizer(make):
    trained = make()
    optimizer = THOR(trained)
    found = curvature_of(trained, optimizer.curvature.values())
    trained(torch.randn(4, 3, 300)).square().mean().backward()
    optimizer.step()
    state = [item for entries in optimizer.state.values() for item in entries.items()]
    curvature = sum(value.nbytes for key, value in state if set(key.split("_")) & {"A", "G"})
    factors = [m for layer in optimizer.curvature.values() for m in (layer.stored.read("A"), layer.stored.read("G"))]
    statistics = sum(part.numel() * part.itemsize for one in factors for part in one.parts())
    assert (found.layers, found.state_bytes, found.statistics_bytes) == (
        len(optimizer.curvature),
        curvature,
        statistics,
    )
    assert found.gradient_bytes == sum(p.grad.nbytes for p in trained.parameters())
    assert found.parameters == sum(p.numel() for p in trained.parameters())


def test_shares():
    """Blocks of 128, 128, 44 (A), 128, 2 (G), 128, 2 (A) and 10 (G)."""
    layers, unsplit = (list(THOR(model(), split_dim=size).curvature.values()) for size in (128, None))
    alone, two, many = (share_of(layers, unsplit, 800, n) for n in (1, 2, 64))
    assert (alone.blocks, alone.imbalance, alone.sent, alone.gradients_sent) == (8, 1.0, 0, 0)
    assert (two.gradients_sent, many.blocks) == (800, 1)
    assert 0 < two.sent < two.sent_unsplit
    assert two.imbalance < 1.1 < many.imbalance


def test_command(monkeypatch, capsys, tmp_path):
    file, out = tmp_path / "mine.py", tmp_path / "plan"
    file.write_text(MODEL)
    words = (f"{file}:build", "--world-size", "1,4", "--split-dim", "64", "--spectral", "--out", out)
    code, printed, _ = call(monkeypatch, capsys, "plan", *words)
    assert code == 0
    assert "2 preconditioned layers" in " ".join(printed.split())
    found = json.loads((out / "plan.json").read_text())
    assert [share["processes"] for share in found["shares"]] == [1, 4]
    assert (found["split_dim"], found["scaling"]) == (64, "spectral")


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
