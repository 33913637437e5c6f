"""The suite: what is tuned, what is reported, and its problems."""

import math

import pytest
import torch

from benchmarks import suite, suite_report
from benchmarks.runner.stores import key_of
from torch_thor.training.data.small import DEBIAN_FASHION_MNIST


def filled(best):
    """Rows of all jobs, as if the error grew with the distance of a rate from `best` of the job."""
    rows = {}
    while todo := [job for job in suite.jobs(rows) if key_of(job) not in rows]:
        for job in todo:
            problem = suite.PROBLEMS[job["task"]]
            if job.get("alone"):
                own = {"milliseconds": {name: [2.0] for name in job["settings"]}}
                own["state_bytes"] = dict.fromkeys(job["settings"], 8.0)
            else:
                middle = suite.CONTENDERS[job["optimizer"]].lr
                off = abs(math.log2(job.get("lr", middle) / middle) - best(job))
                error = 0.1 + 0.01 * off + 0.001 * job.get("momentum", 0.5) + 1e-5 * job["seed"]
                value = 1 - error if problem.higher else error
                own = {"value": value, "curve": [[1, value / 2, 0], [problem.steps, value, 0]]}
            rows[key_of(job)] = {"job": job, **own}
    return rows


def test_each_is_tuned_alike_and_reported_with_other_seeds():
    """The best rate is no end of the rates that were tried, unless there are ten."""
    far = {"vit": 3.0, "unet": -2.0, "pinn": 40.0}
    rows = filled(lambda job: far.get(job["task"], 0.0))
    for problem in suite.PROBLEMS:
        for name in suite.contenders(problem):
            tried = list(suite.tuning(rows, problem, name))
            assert {job["seed"] for job in tried} == {10}
            rates = [job for job in tried if set(job) == {"task", "optimizer", "lr", "seed"}]
            assert len(rates) == (10 if problem == "pinn" else 6), (problem, name)
            off = math.log2(suite.best_job(rows, rates)["lr"] / suite.CONTENDERS[name].lr)
            assert off == pytest.approx({"pinn": 8}.get(problem, far.get(problem, 0)), abs=0.01)
            best = suite.best(rows, tried)
            assert all(key_of(job) in rows for job in suite.confirm(best))
    same = suite.same_settings(rows)
    for own in same.values():  # what most problems want
        assert own["lr"] == suite.CONTENDERS[own["optimizer"]].lr
    found = suite.contests(rows, suite.chosen(rows), same)
    assert [contest.problem for contest in found] == list(suite.PROBLEMS)
    assert "| ThorMuon, one setting |" in suite.table(rows)


def test_a_better_momentum_is_tried_with_the_rates_on_both_sides_of_its_best():
    def best(job):
        at = math.log2(job.get("lr", 1.0) / suite.CONTENDERS[job["optimizer"]].lr)
        return 3.0 if "momentum" in job else at - abs(at) - 5.0

    rows = filled(best)
    for name in suite.PEERS:
        own = suite.chosen(rows)["vit", name]
        assert own["lr"] == pytest.approx(8 * suite.CONTENDERS[name].lr)
        for factor in (0.5, 2.0):
            beside = {**own, "lr": float(f"{own['lr'] * factor:.4g}"), "seed": 10}
            assert key_of(beside) in rows


def test_the_one_rate_for_all_problems_is_no_end_of_those_tried():
    rows = filled(lambda job: 3.0)
    for own in suite.same_settings(rows).values():
        assert own["lr"] == pytest.approx(8 * suite.CONTENDERS[own["optimizer"]].lr)
        beyond = suite.at_rates("vit", own, [2 * own["lr"]])[0]
        assert key_of(beyond) in rows


def test_steps_and_seconds_to_the_ends_of_others_by_hand():
    """Muon ends at 0.5 after 400 steps of 2 ms; ThorMuon passes 0.5 between steps 100 and 200. Its
    steps take 3 ms and its refreshes, of which most come early, 4 ms.
    """
    rows = {}
    for name, lr, curve in (
        ("muon", 0.02, [[200, 0.9, 0], [400, 0.5, 0]]),
        ("thor-muon", 0.08, [[100, 0.6, 30], [200, 0.4, 40], [400, 0.3, 40]]),
    ):
        for seed in range(3):
            job = {"task": "autoencoder", "optimizer": name, "lr": lr, "seed": seed}
            rows[key_of(job)] = {"job": job, "value": curve[-1][1], "curve": curve}
    job = {"task": "autoencoder", "settings": {}, "alone": True}
    times = {"muon": [2.0], "thor-muon": [3.0], "thor-muon refresh": [4.0]}
    rows[key_of(job)] = {"job": job, "milliseconds": times, "state_bytes": {}}
    muon = {"task": "autoencoder", "optimizer": "muon", "lr": 0.02}
    contest = suite_report.Contest("autoencoder", rows, {"muon": muon}, {})
    assert contest.rival == "muon"
    assert contest.steps() == contest.steps("muon") == pytest.approx(150 / 400)
    assert contest.milliseconds("thor-muon") == pytest.approx(3.0 + 40 / 400)
    assert contest.seconds() == pytest.approx((150 * 3 + 35) / (400 * 2))
    assert contest.milliseconds("sgd") is None


@pytest.mark.parametrize(
    "problem",
    ["characters", "pinn", "lstm", "vit", "unet", "nf-resnet", "resnet128", "autoencoder"],
)
def test_a_problem_is_the_same_for_the_same_seed_and_its_halves_differ(problem):
    if problem not in ("characters", "pinn", "lstm") and not DEBIAN_FASHION_MNIST.is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    own, losses = suite.PROBLEMS[problem], []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model, batch = own.model(), next(own.batches(4, seed))
        losses.append(own.loss(model, batch).item())
    assert losses[0] == losses[1] != losses[2]
    chosen, reported = (next(own.held_out(half)) for half in (0, 1))
    assert not torch.equal(chosen[0], reported[0])
    with torch.no_grad():
        assert own.score(model, tuple(part[:3] for part in reported)).shape == (3,)
