"""Trainings without a schedule: rates, the statistics of BatchNorm, and what the table counts."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import anytime
from benchmarks.runner.stores import key_of
from benchmarks.suite_problems import Problem


@pytest.fixture
def problem(monkeypatch):
    def batches(size, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield (
                torch.randn(8, 5, generator=generator),
                torch.randint(3, (8,), generator=generator),
            )

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def score(model, batch):
        return (model(batch[0]).argmax(1) == batch[1]).double()

    def network():
        return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    small = Problem(
        "small", "accuracy", True, 12, 8, network, batches,
        lambda half: [next(batches(8, 100 + half))], loss, score,
    )  # fmt: skip
    monkeypatch.setattr(anytime, "PROBLEMS", {"small": small})
    return small


def test_rates_stay_or_fall_to_zero():
    for step, constant, linear, cosine in (
        (0, 0.2, 0.2, 0.2),
        (50, 1, 50 / 95, 0.5),
        (99, 1, 1 / 95, 0),
    ):
        found = [anytime.share_of_lr(step, 100, s) for s in ("constant", "linear", "cosine")]
        assert found == pytest.approx([constant, linear, cosine], abs=1e-3)


def test_an_average_is_evaluated_with_statistics_of_its_own(problem):
    found = anytime.run({"task": "small", "name": "anytime", "seed": 0})
    assert 0 <= found["as it is"] <= 1
    assert 0 <= found["value"] <= 1
    model = problem.model()
    anytime.take_statistics(problem, model, problem.batches(8, 3))
    inputs = torch.cat(
        [x for x, _ in (next(b) for b in [problem.batches(8, 3)] for _ in range(20))]
    )
    torch.testing.assert_close(
        model[1].running_mean, model[0](inputs).mean(0), rtol=1e-4, atol=1e-5
    )
    other = anytime.run({"task": "small", "name": "thor-muon", "seed": 0})
    assert set(found) - set(other) == {"kept statistics"}


def test_what_is_counted(monkeypatch, problem):
    both = {"up": problem, "down": replace(problem, higher=False)}
    monkeypatch.setattr(anytime, "PROBLEMS", both)
    monkeypatch.setattr(anytime, "_chosen", lambda: {(task, "adamw"): {"lr": 1} for task in both})
    # 10 % of errors; a loss of 2
    values = {"thor-muon": (0.9, 2.0), "anytime": (0.899, 2.1), "adamw": (0.88, 2.08)}
    rows = {}
    for job in anytime.jobs({}):
        if job["name"] in values:
            value = values[job["name"]][job["task"] == "down"]
            rows[key_of(job)] = {"value": value, "as it is": value}
    lines = anytime.table(rows).splitlines()
    (line,) = [line for line in lines if line.startswith("| ThorMuon(anytime=True) | 3.0 %")]
    assert line == "| ThorMuon(anytime=True) | 3.0 % | 1 of 2 | 1 |"
