"""`torch-thor plan`: its numbers are those of the optimizer and of the ring, and bad input gets one
line.
"""

import json
import re

import pytest
import torch
from rich.console import Console

from torch_thor import THOR
from torch_thor.errors import UserError
from torch_thor.printing import quantity
from torch_thor.tools import device_plan as module
from torch_thor.tools.device_plan import Measured, measure, plan, rows_of, subject_of
from torch_thor.training.recipes import load_recipe

CPU = torch.device("cpu")
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

def frozen():
    return build().requires_grad_(False)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return lambda function: f"{tmp_path / 'mine.py'}:{function}"


@pytest.fixture
def console():
    return Console(width=200, record=True)


def test_what_is_kept_and_sent(mine, console, tmp_path):
    """Blocks of 128, 128, 44 (A), 128, 2 (G), 128, 2 (A) and 10 (G)."""
    rows = plan(
        mine("build"),
        console,
        devices=(1, 2, 5, 8),
        shards=2,
        out=tmp_path / "plan",
        optimizer="thor",
    )
    assert [(row.form, row.devices) for row in rows] == [
        ("ddp", 1), *((form, n) for form in ("ddp", "fsdp") for n in (2, 5, 8)),
        ("hsdp", 8)
    ]  # fmt: skip
    alone, two, *_ = rows
    weights = 4 * (301 * 130 + 131 * 10)
    factors = 4 * 2 * (300 * 128 + 130 * 128 + 130 * 128 + 10 * 10)
    assert (alone.sent, alone.sent_more, alone.rounds, alone.most_work) == (0, 0, 0, 1.0)
    assert (alone.memory.curvature, alone.memory.whole) == (factors, 3 * weights + factors)
    assert (two.sent, two.rounds) == (weights, 2)
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert found["measured"] is None
    assert [row["sent_more"] for row in found["rows"]] == [row.sent_more for row in rows]
    text = console.export_text()
    assert "thor: 2 preconditioned layers, 40.4 K trained parameters" in text
    assert module.COLUMNS in text.replace("\n", " ")
    saved = (rows[-1].most_work - 1) / 8
    assert saved > 0
    assert f"shorter by {saved:.1%} of the inversion" in text.replace("\n", " ")
    assert re.search(rf"ddp │ +2 │ +{alone.memory.whole / 1e6:.1f} ", text)


def test_times_are_those_of_the_measured_step_and_a_ring(monkeypatch, mine, console, tmp_path):
    measured = Measured("a device", 4, ordinary=1.0, refresh=7.0, inverting=4.0)
    monkeypatch.setattr(module, "measure", lambda *_: measured)
    optimizer = THOR(subject_of(mine("build"), None, 1).model, split_dim=128)
    (row,) = rows_of(optimizer, "ddp", 4, 8)
    step, network, refresh = row.seconds(measured, 1e6, 0.5)
    assert row.sent == 2 * 161_760 * 3 // 4
    assert network == 6 * 0.5 + row.sent / 1e6  # an all-reduce is two rings of three rounds
    assert step == 1.0 + network
    assert row.rounds_more == 3 * 6  # row counts, agreement, traces, sums, flags, results
    rest = 3.0 + 4.0 * row.most_work / 4
    assert refresh == pytest.approx(rest + network + 18 * 0.5 + row.sent_more / 1e6)
    links = {"bandwidth": 1.0, "latency": 5.0}
    plan(
        mine("timed"),
        console,
        devices=(2, 8),
        batch=4,
        samples=1600,
        out=tmp_path / "out",
        optimizer="thor",
        **links,
    )
    rows = json.loads((tmp_path / "out" / "plan.json").read_text())["rows"]
    seconds = rows[0]["seconds"]
    interval, steps = THOR(torch.nn.Linear(2, 2)).param_groups[0]["update_interval"], 200
    refreshes = len(range(0, steps, interval))
    assert (
        seconds["training"]
        == refreshes * seconds["refresh"] + (steps - refreshes) * seconds["step"]
    )
    assert seconds["network"] == pytest.approx(rows[0]["rounds"] * 5e-6 + rows[0]["sent"] / 1e9)
    text = console.export_text()
    assert "Predicted from a step on a device, with 1 GB/s and 5 µs; nothing overlaps" in text
    assert "Chen et al." not in text


def test_the_minutes_of_the_paper_stand_beside_resnet50(monkeypatch, console):
    monkeypatch.setattr(module, "measure", lambda *_: Measured("a device", 32, 0.1, 0.2, 0.1))
    plan("resnet50", console, devices=(8, 16), batch=32, samples=40 * 1_281_167)
    text = console.export_text()
    assert re.search(r"ddp │ +8 │ +256 .* 66.7 │", text)
    said = "about 40 epochs on Ascend 910, with a batch that grows with the devices too"
    assert f"Chen et al. 2021: {said}" in text.splitlines()
    assert module._refreshes(100, 201) == 3
    # in steps 0, 1, 2, 3 and 13
    assert module._refreshes(lambda step: 1 if step < 3 else 10, 14) == 5


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("digits", 10),
        ("resnet18-cifar10", 10),
        ("bert-tiny", 30522),
        ("bert-large-thor", 30522),
    ],
)
def test_recipes(console, name, outputs):
    """Without their data; settings are those of the recipe."""
    with torch.device("meta"):
        model = subject_of(name, load_recipe(name), 2).model
    assert outputs in {getattr(part, "out_features", None) for part in model.modules()}
    (row,) = plan(name, console, words=["split_dim=16"], devices=(1,))
    (same,) = plan(name, console, split_dim=16, devices=(1,))
    (other,) = plan(name, console, devices=(1,), split_dim=8)
    assert row == same
    assert row.memory.curvature > other.memory.curvature


@pytest.mark.parametrize("name", ["thor", "thor-muon"])
@pytest.mark.parametrize(
    ("subject", "batch"), [("timed", 4), ("own_loss", 6), ("bert-tiny", 2), ("digits", 3)]
)
def test_a_step_is_measured(monkeypatch, mine, subject, batch, name):
    """With the batch of the user's function, or a random one."""
    recipe = load_recipe("digits", ["precision=fp16"]) if subject == "digits" else None
    if subject == "timed":  # an inversion takes no longer than a refresh more than an ordinary step
        monkeypatch.setattr(module, "inverse_seconds", lambda *_, **__: (1e9,))
    subject = mine(subject) if subject in ("timed", "own_loss") else subject
    found = measure(
        subject,
        recipe,
        name,
        {"split_dim": 16, "fisher": "sampled"},
        CPU,
        3 if batch > 3 else batch,
    )
    assert found.batch == batch
    assert found.ordinary > 0
    assert 0 <= found.inverting <= max(0.0, found.refresh - found.ordinary)


@pytest.mark.parametrize(
    ("subject", "options", "said"),
    [
        ("resnet18", {"devices": (0, 2)}, "--devices 0: give 1 or more"),
        ("resnet18", {"shards": 1}, "--shards 1: give 2 or more"),
        ("resnet18", {"batch": 0}, "--batch 0: give 1 or more"),
        ("resnet18", {"bandwidth": 0.0}, "--bandwidth 0.0 must be above 0"),
        ("resnet18", {"latency": -1.0}, "--latency -1.0 at least 0"),
        ("resnet18", {"devices": [8, 10**12]}, f"--devices {10**12}: must be at most 1,000,000"),
        (
            "resnet18",
            {"optimizer": "sgd"},
            "--optimizer sgd: only thor-muon and thor have curvature",
        ),
        ("resnet50-imagenet-sgd", {}, "--optimizer none: only thor-muon and thor"),
        ("resnet18", {"words": ["lr=1"]}, "resnet18 is no recipe: leave lr=1 out"),
        ("char-lm", {}, "task=char-lm: plans are for image-classification and masked-lm"),
        (
            "digits",
            {"words": ["split_dim=auto"]},
            "split_dim=auto is measured by a training: give --split-dim",
        ),
        ("build", {"batch": 2}, "returned a model alone, and its times are to be measured: return"),
        ("frozen", {}, "has no parameters to train"),
        ("nothing", {}, "failed: KeyError"),
        ("resnet5", {}, "did you mean resnet"),
    ],
)
def test_bad_input(mine, console, subject, options, said):
    subject = mine(subject) if subject in ("build", "frozen", "nothing") else subject
    with pytest.raises(UserError, match=re.escape(said)):
        plan(subject, console, **options)


def test_thor_muon_is_planned_for_first(mine, console):
    (row,) = plan(mine("build"), console, devices=(1,))
    assert "thor-muon: 2 preconditioned layers" in console.export_text()
    # blocks of A alone, and their inverses
    assert row.memory.curvature == 4 * 2 * (300 * 128 + 130 * 128)


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999"), (38_282, "38.3 K"), (336_226_108, "336.2 M"), (7_241_732_096, "7.2 B")],
)
def test_numbers_of_parameters(number, text):
    assert quantity(number) == text
