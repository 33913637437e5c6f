"""What the loop does for any task: trees of tensors, unequal parts, metrics in either direction, THOR's terms."""

import copy

import pytest
import torch
from small_tasks import PaddedRows

from torch_thor import THOR, ThorMuon
from torch_thor.training import EvalPoint, History, Run, RunConfig, UserError, evaluate, primary, train
from torch_thor.training.data import Shard
from torch_thor.training.tasks import TASKS


def model_of(task):
    torch.manual_seed(0)
    return task.build_model()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def thor(model, **options):
    return THOR(model, lr=0.1, damping=0.1, update_interval=1, **options)


def run_of(make, **config):
    config = RunConfig(epochs=2, batch_size=6, device="cpu", **config)
    task = PaddedRows(config)
    model = model_of(task)
    return Run(model, make(model), task, config)


@pytest.mark.parametrize("task", TASKS.values())
def test_every_task_has_one_primary_metric_and_a_loss(task):
    assert primary(task.METRICS).primary
    assert [metric.name for metric in task.METRICS].count("loss") == 1


@pytest.mark.parametrize("make", [sgd, thor])
def test_parts_with_unequal_terms_are_one_batch(make):
    """In float64: each part's mean counts as often as it has terms, also where it has none."""
    records = [train(run_of(make, accumulation=parts)) for parts in (1, 3, 6)]
    for record in records[1:]:
        assert [p.terms for p in record.steps] == [p.terms for p in records[0].steps]
        assert [p.loss for p in record.steps] == pytest.approx([p.loss for p in records[0].steps], rel=1e-6)
        assert record.evaluations[-1].loss == pytest.approx(records[0].evaluations[-1].loss, rel=1e-9)


def test_metrics_are_means_over_terms_and_what_derives_from_them():
    task = PaddedRows(RunConfig(batch_size=6))
    model = model_of(task)
    score = evaluate(task, model, task.open_data(Shard()).evaluation)
    labels, mask = task.data["truth"]
    logs = model(task.data["rows"]).log_softmax(-1)
    by_hand = [-logs[i, j, labels[i, j]].item() for i, j in mask.nonzero().tolist()]
    assert score.terms == len(by_hand)
    assert score.metrics["loss"] == pytest.approx(sum(by_hand) / len(by_hand))
    assert score.metrics["double"] == 2 * score.metrics["loss"]


class Watched(PaddedRows):
    """Notes what the optimizer knows in each forward pass."""

    def loss(self, model, batch):
        self.seen.append((self.optimizer.loss_terms, self.optimizer.row_mask))
        return super().loss(model, batch)


def watched(parts, loss_terms=None):
    config = RunConfig(batch_size=6, accumulation=parts)
    task = Watched(config)
    model = model_of(task)
    task.optimizer = thor(model)
    task.optimizer.loss_terms = loss_terms
    batch = next(iter(task.open_data(Shard()).train))
    stepper = Run(model, task.optimizer, task, config).stepper
    stepper.take(batch, 1)
    return task, stepper, batch


def test_thor_is_told_terms_of_the_step_and_rows_of_each_part():
    task, stepper, batch = watched(2)
    whole = task.terms(batch).number
    masks = batch["truth"][1].chunk(2)
    assert [terms for terms, _ in task.seen] == [whole, whole]
    assert all(torch.equal(mask, own) for (_, mask), own in zip(task.seen, masks, strict=True))
    assert task.optimizer.param_groups[0]["last_loss_terms"] == whole
    stepper.take(batch, 2)  # what was told once may be told anew
    assert len(task.seen) == 4


def test_thor_takes_the_steps_of_a_loop_that_tells_it_itself():
    task, _, batch = watched(1)
    model = model_of(task)
    optimizer = thor(model)
    optimizer.loss_terms, optimizer.row_mask = task.terms(batch).number, batch["truth"][1]
    PaddedRows(RunConfig()).loss(model, batch).mean.backward()
    optimizer.step()
    for name, layer in optimizer.curvature.items():
        for own, its in zip(layer.factors(), task.optimizer.curvature[name].factors(), strict=True):
            assert torch.equal(own, its)


def test_what_the_user_has_set_stays():
    task, stepper, batch = watched(1, loss_terms=7)
    assert task.seen[0][0] == 7
    task.optimizer.row_mask = own = torch.ones_like(batch["truth"][1])
    stepper.take(batch, 2)
    assert task.seen[1][1] is own


def test_thor_muon_has_no_use_for_the_number_of_terms():
    config = RunConfig(batch_size=6)
    task = PaddedRows(config)
    model = model_of(task)
    optimizer = ThorMuon(model)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    Run(model, optimizer, task, config).stepper.take(next(iter(task.open_data(Shard()).train)), 1)
    assert optimizer.loss_terms is None
    assert optimizer.state_dict()["param_groups"][0]["last_loss_terms"] == before[0]["last_loss_terms"]


def test_sampled_labels_of_more_than_two_dimensions():
    run = run_of(lambda model: thor(model, fisher="sampled", trace_thresholds=(0.0, 0.0)))
    train(run)
    assert all(layer.refreshes == 4 for layer in run.optimizer.curvature.values())


def falling(*losses):
    return [EvalPoint(step, 1.0 * step, {"loss": loss}, None, "loss", False) for step, loss in enumerate(losses, 1)]


def test_lower_is_better():
    record = History([], falling(float("nan"), 3.0, 1.5, 2.0, 1.5))
    assert record.best.step == 3
    assert record.first_reaching(2.0).step == 3
    assert record.first_reaching(1.0) is None


def test_a_run_stops_at_a_loss():
    losses = [point.loss for point in train(run_of(sgd, eval_interval=1)).evaluations]
    assert losses == sorted(losses, reverse=True)
    run = run_of(sgd, eval_interval=1, stop_at=losses[1])
    assert [point.loss for point in train(run).evaluations] == losses[:2]


@pytest.mark.parametrize("target", [0.0, -1.0, float("inf"), float("nan")])
def test_targets_that_no_loss_reaches(target):
    with pytest.raises(UserError, match="must be above 0 and finite: it is a value of held-out loss"):
        run_of(sgd, stop_at=target)


def test_an_unknown_metric_is_named():
    (point,) = falling(1.0)
    assert (point.loss, point.averaged_loss, point.value) == (1.0, None, 1.0)
    with pytest.raises(AttributeError, match="this evaluation has no top1: its metrics are loss"):
        point.top1  # noqa: B018
    assert copy.deepcopy(point) == point
