"""The loop for any task: parts of a batch, the order of things, and the end of a training."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from padded import OPTIMIZERS, Diary, Padded, started
from torch import nn

from tiny import assert_same
from torch_thor import THOR
from torch_thor.errors import DivergedError, UserError
from torch_thor.training import loop
from torch_thor.training.evaluation import evaluate
from torch_thor.training.loop import Record, split, train
from torch_thor.training.parallel import Ranks

sys.path.append(str(Path(__file__).parents[1] / "distributed"))  # where the pool of processes is

from ranks import Ranks as Pool


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


@pytest.fixture(scope="module")
def pool():
    ranks = Pool(most=2)
    yield ranks
    ranks.close()


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


def test_batches_are_split_as_often_as_the_phase_says():
    batch = {"a": torch.arange(5), "b": (torch.arange(10).view(5, 2), [torch.ones(5)])}
    parts = split(batch, 4)
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part["b"][0][:, 0].tolist() for part in parts] == [[0, 2], [4, 6], [8]]
    assert [len(part["b"][1][0]) for part in parts] == [2, 2, 1]
    run = started(phases=[{"steps": 3, "accumulation": 6}, {"steps": 2}], epochs=1, eval_interval=9)
    train(run)
    assert run.task.passes == 3 * 6 + 2 + 8  # 8 of the evaluation at the end


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


class Slow(Padded):
    """A batch takes a second of a clock; from step 6 on, no batch has terms."""

    now = 0.0

    def batches(self, ranks, start):
        for batch in super().batches(ranks, start):
            self.now += 1
            batch["truth"][1].logical_and_(torch.tensor(self.read < 5))
            yield batch


def test_waiting_for_data_is_timed_and_a_batch_without_terms_is_refused(monkeypatch):
    run, record = started(task=(task := Slow())), Record()
    monkeypatch.setattr(loop.time, "perf_counter", lambda: task.now)
    said = r"the batch of step 6 has no loss term on a process: .* raise batch_size"
    with pytest.raises(UserError, match=said):
        train(run, [record])
    assert [(point.waited, point.duration) for point in record.points] == [(1, 1)] * 4


def test_observers_see_everything_in_order_and_are_closed():
    run, diary = started(steps=3, eval_interval=2), Diary()
    train(run, [diary])
    found = ", ".join(diary.lines)
    assert found == "step 1, end 1, step 2, eval 2, end 2, step 3, eval 3, end 3, close"
    assert run.task.read == 2  # not one more than the last step needs
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
    train(run)  # a run that is done takes no step
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


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_leaves_no_trace(training):
    layers = nn.Flatten(0, 1), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
    model = nn.Sequential(*layers, nn.Unflatten(0, (-1, 5))).double().train(training)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    evaluate(Padded(), model, Ranks())
    assert [module.training for module in model.modules()] == [training] * 6
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
