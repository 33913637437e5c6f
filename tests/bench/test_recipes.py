"""A recipe trained for a comparison: what is kept of it, and divergence as a result."""

import json
from statistics import median

import yaml

from torch_thor.bench import train_recipe

WORDS = ["epochs=1", "batch_size=256", "eval_interval=3", "device=cpu"]


def test_what_is_kept_of_a_training():
    run, record, kept = train_recipe("digits", "thor", [*WORDS, "seed=3"])
    assert (run.step, kept["steps"], kept["failure"]) == (5, 5, None)
    assert [step for step, _, _ in kept["evaluations"]] == [3, 5]
    assert kept["evaluations"][-1][1] == record.scores[-1].metrics["top1"]
    assert kept["loss"] == [round(point.loss, 5) for point in record.points]
    for kind, refresh in (("refresh", True), ("ordinary", False)):
        durations = [point.duration for point in record.points if point.refresh == refresh]
        assert kept[f"seconds_{kind}_step"] == median(durations)
    assert yaml.safe_load(kept["recipe"])["seed"] == 3
    assert json.loads(json.dumps(kept)) == kept


def test_divergence_is_a_result():
    run, _, kept = train_recipe("digits", "sgd", [*WORDS, "lr=1e30"])
    assert "loss became" in kept["failure"]
    assert run.step < kept["steps"]
