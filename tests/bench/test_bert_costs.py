"""Costs on BERT: the computed memory is the measured one, and ratios are taken within a round."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bert_costs")


@pytest.mark.filterwarnings("ignore:THOR preconditions")
def test_computed_memory_is_the_measured_one_and_each_round_has_one_refresh(costs):
    vocab_size = 300
    times, measured = costs.seconds("bert-tiny", costs.make_batch(vocab_size, 2, 16), vocab_size, rounds=1)
    assert {name: len(taken) for name, taken in times.items()} == dict.fromkeys(
        ("adamw", "adamw 2", "thor", "thor refresh", "thor-spectral", "thor-spectral refresh"), 1
    )
    assert measured == {
        name: costs.computed_bytes("bert-tiny", vocab_size, both=name == "thor") for name in ("thor", "thor-spectral")
    }


def test_memory_of_bert_base_by_hand(costs):
    attention, feed_forward = 4 * 6 * 128**2, (6 + 24) * 128**2
    assert costs.computed_bytes("bert-base", 30522, both=False) == 8 * (
        12 * (attention + feed_forward) + 3 * 6 * 128**2
    )


def test_ratios_are_taken_within_a_round(costs):
    times = {"adamw": [1.0, 10.0, 100.0], "adamw 2": [2.0, 20.0, 200.0]}
    for name, factor in (("thor", 1.1), ("thor-spectral", 1.5)):
        times[name] = [factor * one for one in times["adamw"]]
        times[f"{name} refresh"] = [2 * factor * one for one in times["adamw"]]
    found = costs.summary(times)
    assert found["thor"] == pytest.approx(dict(zip(found["thor"], (1.1, 1.1, 1.0), strict=True)))
    assert found["thor-spectral"] == pytest.approx(dict(zip(found["thor-spectral"], (1.5, 1.5, 1.0), strict=True)))


def test_a_batch_has_the_tasks_share_of_masked_tokens(costs):
    torch.manual_seed(0)
    batch = costs.make_batch(1000, 4, 128)
    assert ((batch["labels"] >= 0).sum(1) == round(0.15 * 128)).all()
    assert (batch["input_ids"][batch["labels"] >= 0] == 4).all()
