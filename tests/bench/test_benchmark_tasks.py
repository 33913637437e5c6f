"""The benchmarks' tasks train through the application's loop, and give the numbers that were recorded before."""

import importlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from first_steps import assert_recorded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results" / "scale_free"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of Debian
RECORDED = [
    "classifier-sgd-lr0.2-seed0",
    "classifier-thor-lr0.08-seed0",
    "autoencoder-sgd-lr0.008-seed0",
    "autoencoder-thor-lr0.08-seed0",
    "language-sgd-lr0.1-momentum0.8-seed0",
    "language-thor-lr0.08-seed0",
]

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="recorded results are in the repository alone")


@pytest.fixture
def tasks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tasks")


@pytest.mark.parametrize("name", RECORDED)
def test_first_losses_are_those_that_were_recorded(tasks, name):
    recorded = json.loads((RESULTS / f"{name}.json").read_text())
    if recorded["task"] == "language" and recorded["text"] != tasks.text_checksum():
        pytest.skip("another Python version has another text")
    if recorded["task"] != "language" and not FASHION_MNIST.exists():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    setting = importlib.import_module("contenders").Setting(
        recorded["optimizer"], recorded["lr"], recorded.get("momentum")
    )
    assert_recorded(tasks.new_run(tasks.TASKS[recorded["task"]], recorded["seed"], setting.make), recorded)


def test_one_generator_draws_the_order_of_all_epochs(tasks):
    order = tasks.OneShuffle(10, 4, 7)
    generator = torch.Generator().manual_seed(7)
    for epoch in range(3):
        whole = torch.randperm(10, generator=generator).tolist()
        assert list(order.epoch(epoch)) == [whole[:4], whole[4:8]]
        assert list(order.epoch(epoch, 1)) == [whole[4:8]]


def test_one_generator_draws_the_windows_of_all_epochs(tasks):
    order = tasks.OneDraw(12, 4, 7, positions=700)
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(700, (4,), generator=generator).tolist() for _ in range(9)]
    assert [list(order.epoch(epoch)) for epoch in range(3)] == [drawn[:3], drawn[3:6], drawn[6:]]
    assert list(order.epoch(1, 2)) == drawn[5:6]


def test_the_orders_are_those_that_were_recorded(tasks):
    """The first three samples of two batches, with seed 10: at the beginning of epoch 0, and of epoch 1 but one."""
    images, windows = tasks.OneShuffle(60_000, 128, 10), tasks.OneDraw(5584, 16, 10, positions=357_362)
    firsts = [batch[:3] for order in (images, windows) for batch in itertools.islice(order.epoch(0), 2)]
    assert firsts[:2] == [[16937, 30792, 31904], [54597, 27147, 35106]]
    assert firsts[2:] == [[51197, 239825, 145794], [165920, 42794, 255534]]
    assert [batch[:3] for batch in itertools.islice(images.epoch(1, 1), 2)] == [
        [15731, 19673, 13858],
        [58375, 38702, 25737],
    ]


def test_a_loss_that_does_not_come_back_ends_the_training(tasks):
    setting = importlib.import_module("contenders").Setting("sgd", 100.0)
    outcome = tasks.train(replace(tasks.TASKS["language"], steps=30), 0, setting.make)
    assert outcome["failure"].startswith("step 3: loss 2")  # finite, and too much
    assert len(outcome["loss"]) == 3
    assert outcome["evaluations"] == []
