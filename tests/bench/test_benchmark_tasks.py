"""The benchmarks' tasks train through the application's loop, and give the numbers that were recorded before."""

import importlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from first_steps import assert_recorded
from torch_thor.training import Ranks

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


def test_one_generator_draws_the_batches_of_all_epochs(tasks):
    generator = torch.Generator().manual_seed(7)
    orders = [torch.randperm(10, generator=generator).tolist() for _ in range(3)]
    found = [batch.tolist() for batch in itertools.islice(tasks.one_shuffle(10, 4, 7), 6)]
    assert found == [order[first : first + 4] for order in orders for first in (0, 4)]  # the last two are left out
    generator = torch.Generator().manual_seed(7)
    windows = [torch.randint(700, (4,), generator=generator).tolist() for _ in range(9)]
    assert [batch.tolist() for batch in itertools.islice(tasks.one_draw(700, 4, 7), 9)] == windows


def test_the_orders_are_those_that_were_recorded(tasks):
    """The first three samples of batches with seed 10: the first two, and the second and third of the second epoch."""
    found = [
        [batch[:3].tolist() for batch in itertools.islice(order, first, first + 2)]
        for order, first in (
            (tasks.one_shuffle(60_000, 128, 10), 0),
            (tasks.one_draw(357_362, 16, 10), 0),
            (tasks.one_shuffle(60_000, 128, 10), 469),
        )
    ]
    assert found[0] == [[16937, 30792, 31904], [54597, 27147, 35106]]
    assert found[1] == [[51197, 239825, 145794], [165920, 42794, 255534]]
    assert found[2] == [[15731, 19673, 13858], [58375, 38702, 25737]]


def test_batches_continue_after_some_steps(tasks):
    task = tasks.TASKS["language"].open(tasks.TASKS["language"].recipe(0))
    fourth = next(itertools.islice(task.batches(Ranks(), 0), 3, None))
    assert all(own.equal(one) for own, one in zip(next(task.batches(Ranks(), 3)), fourth, strict=True))


def test_a_loss_that_does_not_come_back_ends_the_training(tasks):
    setting = importlib.import_module("contenders").Setting("sgd", 100.0)
    outcome = tasks.train(replace(tasks.TASKS["language"], steps=30), 0, setting.make)
    assert outcome["failure"].startswith("step 3: loss 2")  # finite, and too much
    assert len(outcome["loss"]) == 3
    assert outcome["evaluations"] == []
