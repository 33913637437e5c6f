"""The curve of a training with BabyLM's settings, from the metrics of its run."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def babylm(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("babylm")


def step(number, loss, seconds=1.0):
    return json.dumps({"kind": "step", "step": number, "loss": loss, "duration": seconds})


def evaluation(number, loss):
    return json.dumps({"kind": "eval", "step": number, "loss": loss, "mlm_accuracy": 0.25})


def test_a_step_that_was_taken_again_counts_once(babylm):
    lines = [step(i, 8.0) for i in range(1, 81)] + [step(i, 2.0, 3.0) for i in range(51, 121)] + [evaluation(120, 1.5)]
    found = babylm.curve(lines)
    assert (found["steps"], found["median_step"]) == (120, 3.0)
    assert found["training_loss"] == [(50, 8.0), (100, 2.0)]
    assert found["evaluations"] == [{"step": 120, "loss": 1.5, "accuracy": 0.25}]


def test_the_table_ends_with_the_last_evaluation(babylm):
    found = babylm.curve([step(i, 1.0) for i in range(1, 1251)] + [evaluation(i, 2.0) for i in (500, 1000, 1250)])
    assert babylm.rows(found["evaluations"], 1000) == [
        ["1,000", "2.00", "25.0 %"],
        ["1,250", "2.00", "25.0 %"],
    ]
