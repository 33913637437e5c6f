"""The loop for any task: parts of a batch, the order of things, and the end of a training."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tiny import assert_same
from torch_thor import THOR
from torch_thor.errors import DivergedError, UserError
from torch_thor.training import loop
from torch_thor.training.evaluation import evaluate
from torch_thor.training.loop import Observer, Record, split, train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.run import build
from torch_thor.training.tasks.task import Loss, Metric, Terms

COUNTS = torch.tensor([5, 1, 0, 3, 2, 4])  # rows that are no padding, of the five of each sample
CUTS = {1: (0, 6), 2: (0, 2, 6)}  # where batches are cut, by the number of processes
MUON = {"lr": 0.05, "damping": 0.1, "update_interval": 2, "factor_decay": 0.5}
OPTIMIZERS = {
    "sgd": {"lr": 0.3},
    "thor": {**MUON, "trace_thresholds": (0.0, 0.0)},
    "thor-muon": MUON,
}


class Padded:
    """Sequences of labelled rows and of padding, which is `junk`; a step may be spoiled by NaN."""

    unit, steps_per_epoch, data = "rows", 4, {"samples": 24}
    metrics = (
        Metric("loss", "loss", "loss", False, primary=True),
        Metric("double", "double", "double", False, derived=lambda means: 2 * means["loss"]),
    )

    def __init__(self, junk=0.0, spoiled=None):
        self.junk, self.spoiled, self.read = junk, spoiled, -1

    def model(self):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def batch(self, seed, own=slice(None)):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (6, 5), generator=generator)
        counts = torch.arange(5) < COUNTS[:, None]
        rows *= float("nan") if seed + 1 == self.spoiled else 1
        rows = rows.where(counts[..., None], self.junk)
        return {"rows": rows[own], "truth": (labels[own], counts[own])}

    def batches(self, ranks, start):
        for self.read in itertools.count(start):
            yield self.batch(self.read, slice(*CUTS[ranks.world][ranks.rank : ranks.rank + 2]))

    def held_out(self, ranks):
        nothing = self.batch(0, slice(2, 3))  # a sequence of padding
        for seed in (100, 101, 102, 103)[ranks.rank :: ranks.world]:
            yield from ((self.batch(seed), True), (self.batch(seed + 50), False), (nothing, True))

    def terms(self, batch):
        return Terms(int(batch["truth"][1].sum()), batch["truth"][1])

    def each(self, scores, batch):
        labels, counts = batch["truth"]
        losses = F.cross_entropy(scores.movedim(-1, 1), labels, reduction="none")
        return losses.where(counts, 0.0).sum()

    def loss(self, net, batch):
        scores = net(batch["rows"])
        mean = self.each(scores, batch) / max(1, self.terms(batch).number)
        return Loss(mean, scores.flatten(0, 1))

    def measure(self, net, batch):
        return {"loss": self.each(net(batch["rows"]), batch)}


def started(name="sgd", task=None, ranks=None, *, settings=None, **given):
    """A run of the task with an optimizer by name, before its first step."""
    own = {"epochs": 2, "batch_size": 6, "seed": 5, "device": "cpu", "schedule": {"kind": "linear"}}
    own |= {"optimizer": [name], "optimizers": {name: OPTIMIZERS[name] | (settings or {})}}
    recipe = Recipe.model_validate(own | given)
    return build(recipe, name, task or Padded(), ranks or Ranks())


class Diary(Observer):
    """Writes a line for each call, and raises at the line `error`."""

    def __init__(self, error=None):
        self.lines, self.error = [], error

    def write(self, line):
        self.lines.append(line)
        if line == self.error:
            raise UserError(f"at {line}")

    def step(self, run, point):
        self.write(f"step {point.step}")

    def evaluation(self, run, score):
        self.write(f"eval {score.step}")

    def end_of_step(self, run):
        self.write(f"end {run.step}")

    def close(self):
        self.write("close")


def result(*given, **options):
    """The results that must not depend on how a batch is divided."""
    run, record = started(*given, **options), Record()
    train(run, [record])
    layers = getattr(run.optimizer, "curvature", {}).values()
    return {
        "weights": dict(run.model.state_dict()),
        "factors": [f for layer in layers for f in layer.factors() if f is not None],
        "metrics": [score.metrics for score in record.scores],
        "loss": [point.loss for point in record.points],
        "terms": [point.terms for point in record.points],
    }


def on_rank(rank, world, name, given):
    return result(name, Padded(junk=7.0), Ranks(rank, world), **given)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_and_processes_are_one_batch(name, pool, tmp_path):
    """Means count as often as they have terms, and padding is in no factor, in float64."""
    for clip in (None, 0.2):
        whole = result(name, clip_norm=clip)
        assert whole["terms"] == [15] * 8
        assert len(whole["factors"]) == {"sgd": 0, "thor": 4, "thor-muon": 2}[name]
        for parts in (1, 2, 3, 6):
            found = result(name, Padded(junk=7.0), clip_norm=clip, accumulation=parts)
            torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-9)
        for parts in (1, 2):
            given = {"clip_norm": clip, "accumulation": parts}
            first, second = pool.run(2, tmp_path, on_rank, name, given)
            assert first["loss"] == second["loss"]
            torch.testing.assert_close(first, whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_equals_a_loop_written_out(fisher):
    """To the bit: terms, rows and outputs for THOR, clipping, learning rate and step."""
    run = started("thor", clip_norm=0.45, accumulation=2, settings={"fisher": fisher})
    train(run, [record := Record()])
    torch.manual_seed(5)
    task, norms, seconds = Padded(), [], 0
    model = task.model()
    optimizer = THOR(model, **OPTIMIZERS["thor"], fisher=fisher)
    for step, point in enumerate(record.points):
        mean, lr, optimizer.loss_terms = 0, 0.05 * (1 - step / 8), 15
        for part in split(task.batch(step), 2):
            optimizer.row_mask = part["truth"][1]
            found = task.loss(model, part)
            if fisher == "sampled":
                optimizer.sample_fisher(found.output, dim=-1, seed=5)
            share = found.mean * (task.terms(part).number / 15)
            share.backward()
            mean += share.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.45))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        seconds += point.duration
        found = (point.loss, point.lr, point.damping, point.seconds)
        assert found == pytest.approx((mean, lr, 0.1, seconds), rel=1e-6)
        assert point.refresh == (step % 2 == 0) == bool(point.events)
    assert min(norms) < 0.45 < max(norms)
    assert_same(dict(run.model.state_dict()), dict(model.state_dict()))
    assert record.scores[-1].seconds == record.points[-1].seconds


def test_observers_see_everything_in_order_and_are_closed():
    run, diary = started(steps=3, eval_interval=2), Diary()
    train(run, [diary])
    found = ", ".join(diary.lines)
    assert found == "step 1, end 1, step 2, eval 2, end 2, step 3, eval 3, end 3, close"
    assert run.task.read == 2  # no batch after the last step
    for error in ("step 2", "eval 2", "end 2", "close"):
        both = [Diary(error), Diary()]
        with pytest.raises(UserError, match=f"at {error}"):
            train(started(steps=3, eval_interval=2), both)
        assert all(diary.lines.index("close") == len(diary.lines) - 1 for diary in both)


ENDS = [
    ({}, [4, 8]), ({"eval_epochs": 2}, [8]), ({"eval_interval": 3, "eval_epochs": 2}, [3, 6, 8]),
    ({"steps": 5}, [4, 5]), ({"stop_at": 1.5, "eval_interval": 1}, [1, 2, 3]),
    ({"stop_at": 2.5, "eval_interval": 1, "ema_decay": 0.5}, [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "steps"), ENDS)
def test_when_a_training_evaluates_and_ends(monkeypatch, given, steps):
    """The metric falls to 1.5 in step 3; with averaged weights it falls to 2.5 in step 2."""
    run, record = started(**given), Record()
    own, averages = [9, float("nan"), 3.0, 1.5, 2.0, 1.5, 9, 9, 9], [9, 4.0, 2.5, *[9] * 6]

    def evaluated(_, net, *rest):
        return {"loss": (own if net is run.model else averages)[run.step]}, 1

    monkeypatch.setattr(loop, "evaluate", evaluated)
    train(run, [record])
    assert [score.step for score in record.scores] == steps
    # NaN is worse than any number
    assert steps != [1, 2, 3] or (run.best.step, run.best.value("loss")) == (3, 1.5)
    assert (run.step, run.done) == (steps[-1], True)


def on_two(rank, world):
    run = started(ranks=Ranks(rank, world))
    return evaluate(run.task, run.model, run.ranks)[0]


def test_metrics_are_means_over_terms(pool, tmp_path):
    """To the last bit the same for two processes; repeated and empty batches do not count."""
    run, losses = started(), []
    for batch in map(run.task.batch, (100, 101, 102, 103)):
        labels, counts = batch["truth"]
        scores = run.model(batch["rows"]).log_softmax(-1)
        losses += [-scores[i, j, labels[i, j]].item() for i, j in counts.nonzero().tolist()]
    found, number = evaluate(run.task, run.model, run.ranks)
    assert number == 60
    assert found == {"loss": pytest.approx(sum(losses) / 60), "double": 2 * found["loss"]}
    assert pool.run(2, tmp_path, on_two) == [found, found]


def test_an_evaluation_leaves_no_trace():
    layers = nn.Flatten(0, 1), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
    model = nn.Sequential(*layers, nn.Unflatten(0, (-1, 5))).double()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    evaluate(Padded(), model, Ranks())
    assert all(module.training for module in model.modules())
    assert_same(dict(model.state_dict()), dict(before))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sgd", r"^the loss became nan at step 3 \(lr=0.225\): lower lr, add .* raise damping$"),
        ("thor", "^step 3: "),
    ],
)
def test_divergence_is_one_error_that_names_the_step(name, said):
    run, diary = started(name, Padded(spoiled=3), eval_interval=1), Diary()
    with pytest.raises(DivergedError, match=said) as caught:
        train(run, [diary])
    assert "\n" not in str(caught.value)
    assert (run.step, diary.lines[-2:]) == (2, ["end 2", "close"])
