"""A recipe trained for a comparison: what is kept of it, and divergence as a result."""

import json

import yaml

from torch_thor.bench import train_recipe

WORDS = ["epochs=1", "batch_size=256", "eval_interval=3", "device=cpu"]


def test_what_is_kept_of_a_training():
    run, kept = train_recipe("digits", "thor", [*WORDS, "seed=3"])
    assert (run.step, kept["steps"], kept["failure"]) == (5, 5, None)
    assert [step for step, _, _ in kept["evaluations"]] == [3, 5]
    assert kept["evaluations"][-1][1] == run.record.evaluations[-1].top1
    assert kept["loss"] == [round(point.loss, 5) for point in run.record.steps]
    assert kept["seconds_refresh_step"] == run.record.median_duration(refresh=True)
    assert kept["seconds_ordinary_step"] == run.record.median_duration(refresh=False)
    assert yaml.safe_load(kept["recipe"])["seed"] == 3
    assert json.loads(json.dumps(kept)) == kept


def test_divergence_is_a_result():
    run, kept = train_recipe("digits", "sgd", [*WORDS, "lr=1e30"])
    assert "loss became" in kept["failure"]
    assert run.step < kept["steps"]
