"""The one function that trains, on a problem of 12 steps: seeds, rates, averages, times."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import anytime, training
from benchmarks.optimizers import NewtonMuon, make
from benchmarks.suite_problems import Problem


def batches(size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(size, 5, generator=generator)
        yield inputs, (inputs[:, 0] > 0).long()


@pytest.fixture
def problem(monkeypatch):
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def score(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def network():
        return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    small = Problem(
        "small", "loss", False, 12, 8, network, batches,
        lambda half: [next(batches(8, 100 + half))], loss, score,
    )  # fmt: skip
    monkeypatch.setattr(training, "PROBLEMS", {"small": small})
    return small


@pytest.mark.parametrize(
    "job",
    [
        {"optimizer": "thor-muon"},
        {"optimizer": "thor-muon", "curvature": False, "products": True},
        {"optimizer": "thor-muon", "anytime": True, "schedule": "constant"},
        {"optimizer": "newton-muon", "lr": 0.02},
        {"optimizer": "torch-adamw", "lr": 0.01},
    ],
    ids=lambda job: ", ".join(map(str, job.values())),
)
def test_a_training_learns_and_a_seed_gives_the_same_again(problem, job):
    first, again, other = (
        training.run({"task": "small", **job, "seed": seed}) for seed in (0, 0, 1)
    )
    first["seconds"] = again["seconds"] = 0
    assert first == again
    assert first["value"] != other["value"]
    assert [point[0] for point in first["curve"]] == list(range(1, 13))
    assert first["value"] == first["curve"][-1][1] < first["curve"][0][1]
    assert (first["curve"][-1][2] > 0) == bool(training.optimizers({"task": "small", **job}))
    assert ("kept statistics" in first) == ("anytime" in job)


def test_a_seed_that_chooses_reads_the_other_half(problem):
    job = {"task": "small", "optimizer": "torch-adamw", "lr": 0.01, "seed": 10}
    assert training.run(job)["value"] == training.run({**job, "half": 0})["value"]
    assert training.run(job)["value"] != training.run({**job, "half": 1})["value"]
    assert "curve" not in training.run(job)
    diverged = training.run({**job, "optimizer": "sgd", "lr": 1e9})
    assert diverged["value"] is None


def test_rates_stay_or_fall_to_zero():
    for step, constant, linear, cosine in (
        (0, 0.2, 0.2, 0.2),
        (50, 1, 50 / 95, 0.5),
        (99, 1, 1 / 95, 0),
    ):
        found = [training.share_of_lr(step, 100, s) for s in ("constant", "linear", "cosine")]
        assert found == pytest.approx([constant, linear, cosine], abs=1e-3)


def test_the_rate_of_schedule_free_adamw_stays(problem, monkeypatch):
    monkeypatch.setattr(
        training, "make", lambda _, model, lr: torch.optim.SGD(model.parameters(), lr)
    )
    job = {"task": "small", "lr": 0.1, "seed": 0}
    falls = training.run({**job, "optimizer": "sgd"})
    stays = training.run({**job, "optimizer": "sgd", "schedule": "constant"})
    free = training.run({**job, "optimizer": "schedule-free"})
    assert free["value"] == stays["value"] != falls["value"]


def test_an_average_is_evaluated_with_statistics_of_its_own(problem):
    model = problem.model()
    optimizer = make("thor-muon", model, anytime=True)
    problem.loss(model, next(batches(8, 1))).backward()
    optimizer.step()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = training.evaluate(problem, model, optimizer, batches(8, 3), 1)
    torch.testing.assert_close(dict(model.state_dict()), before)
    optimizer.eval()
    training.take_statistics(problem, model, [model[1]], batches(8, 3))
    assert found == training.figure(problem, model, 1)


def test_steps_of_all_are_timed(problem):
    settings = {
        "torch-adamw": {"optimizer": "torch-adamw"},
        "thor-muon": {"optimizer": "thor-muon"},
    }
    job = {"task": "small", "settings": settings, "alone": True}
    row = training.run(job)
    assert row["milliseconds"].keys() == {*settings, "thor-muon refresh"}
    assert row["state_bytes"]["torch-adamw"] == pytest.approx(8.0, abs=0.5)
    assert training.optimizers(job) == ["ThorMuon"]


def test_newton_muon_by_hand():
    """Gradients are multiplied by (K + 0.2 tr(K) / d I)⁻¹ from step 16 on, AdamW's are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 6))
    model[3].weight = model[0].weight  # which AdamW trains
    optimizer, seen = NewtonMuon(model, lr=0.1, adamw_embeddings=True), {}
    for half, number in (("muon", 1), ("adamw", 3)):
        weight = model[number].weight
        optimizer._inner[half].step = lambda n=number, w=weight: seen.update({n: w.grad.clone()})
    k = 1e-3 * torch.eye(4)
    for step in range(32):
        codes = torch.randint(0, 6, (8,))
        model.zero_grad()
        model(codes).square().sum().backward()
        gradients = {number: model[number].weight.grad.clone() for number in (1, 3)}
        rows = model[0](codes).detach()
        if step in (15, 31):
            k = 0.8 * k + 0.2 * rows.T @ rows / 8
        optimizer.step()
        if step >= 15:
            gradients[1] @= torch.linalg.inv(k + 0.2 * k.trace() / 4 * torch.eye(4))
        torch.testing.assert_close(seen, gradients, rtol=1e-4, atol=1e-4)


def test_without_a_schedule_what_is_counted(monkeypatch, problem):
    both = {"up": replace(problem, higher=True), "down": problem}
    monkeypatch.setattr(anytime, "PROBLEMS", both)
    monkeypatch.setattr(anytime, "OTHERS", {})
    adamw = {(task, "adamw"): {"task": task, "optimizer": "adamw", "lr": 1} for task in both}
    monkeypatch.setattr(anytime, "tuned", lambda: adamw)
    # 10 % of errors; a loss of 2
    known = {anytime.SCHEDULED: (0.9, 2.0), anytime.ANYTIME: (0.899, 2.1)}
    known[anytime.ADAMW] = (0.88, 2.08)
    rows = {}
    for title in anytime.TITLES.keys() - {anytime.AS_IT_IS}:
        for task, value in zip(both, known.get(title, (0.5, 9.0)), strict=True):
            for job in training.confirm(anytime.setting(title, task)):
                rows[training.key_of(job)] = {"value": value, "as it is": value}
    assert "| ThorMuon(anytime=True) | 3.0 % | 1 of 2 | 1 |" in anytime.table(rows).splitlines()
