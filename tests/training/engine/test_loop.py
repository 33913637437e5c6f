"""The loop: what it does in which order, and what it records."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from replaying import accuracy_point
from torch_thor.training import (
    Callback,
    History,
    Run,
    RunConfig,
    ScheduleSpec,
    StepPoint,
    UserError,
    resolve_device,
    train,
)
from torch_thor.training.data import DataBundle, epoch_order
from torch_thor.training.tasks import ImageClassification


@pytest.fixture
def data():
    return DataBundle(torch.randn(10, 4), torch.randint(3, (10,)), torch.randn(6, 4), torch.randint(3, (6,)), 3)


def new(data, config, lr=0.1):
    torch.manual_seed(config.seed)
    model = nn.Linear(4, 3)
    return Run(model, torch.optim.SGD(model.parameters(), lr=lr), ImageClassification(data, config), config)


def test_equals_a_loop_written_out(data):
    config = RunConfig(epochs=2, batch_size=3, seed=5, label_smoothing=0.1, schedule=ScheduleSpec("linear"))
    record = train(run := new(data, config))
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    losses = []
    for step in range(6):  # three batches of three in each of two epochs; the tenth image is left out
        chosen = epoch_order(10, 5, step // 3)[3 * (step % 3) :][:3]
        loss = functional.cross_entropy(
            model(data.train_images[chosen]), data.train_labels[chosen], label_smoothing=0.1
        )
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (1 - step / 6) * p.grad
        losses.append(loss.item())
    assert [point.loss for point in record.steps] == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(run.model.weight, model.weight, atol=1e-6)
    assert [point.lr for point in record.steps] == pytest.approx([0.1 * (1 - t / 6) for t in range(6)])


@pytest.mark.parametrize("steps", [2, 5])
def test_a_length_in_steps_takes_the_place_of_epochs(data, steps):
    """Less than an epoch of three batches, or one and two thirds; the schedule and the evaluations end with it."""
    config = RunConfig(epochs=9, steps=steps, batch_size=3, seed=5, schedule=ScheduleSpec("linear"))
    record = train(run := new(data, config))
    assert (run.step, run.total_steps, run.done) == (steps, steps, True)
    assert [point.lr for point in record.steps] == pytest.approx([0.1 * (1 - t / steps) for t in range(steps)])
    assert record.evaluations[-1].step == steps
    same = train(new(data, RunConfig(epochs=2, batch_size=3, seed=5)))
    assert record.steps[0].loss == same.steps[0].loss


def test_no_steps_are_refused():
    with pytest.raises(UserError, match="steps=0 must be 1 or more optimizer steps; null trains for epochs"):
        RunConfig(steps=0)


class Diary(Callback):
    def __init__(self):
        self.lines = []

    def before_training(self, run):
        self.lines.append("begin")

    def after_step(self, run, point):
        self.lines.append(f"step {point.step}")

    def after_evaluation(self, run, point):
        self.lines.append(f"eval {point.step}")

    def at_boundary(self, run):
        self.lines.append(f"boundary {run.step}")

    def after_training(self, run):
        self.lines.append("end")


def test_callbacks_hear_everything_in_order(data):
    diary = Diary()
    train(new(data, RunConfig(epochs=1, batch_size=3, eval_interval=2)), [diary])
    said = "begin, step 1, boundary 1, step 2, eval 2, boundary 2, step 3, eval 3, boundary 3, end"
    assert diary.lines == said.split(", ")


def test_seconds_are_the_sum_of_the_steps(data):
    record = train(new(data, RunConfig(epochs=3, batch_size=5)))
    total = 0.0
    for point in record.steps:
        total += point.duration
        assert point.seconds == pytest.approx(total)
    assert record.evaluations[-1].seconds == record.steps[-1].seconds


def test_a_loss_that_is_not_finite_stops_with_a_remedy(data):
    data.train_images[3] = float("inf")
    with pytest.raises(UserError, match=r"loss became nan at step [12] .* lower lr"):
        train(new(data, RunConfig(batch_size=5)))


def test_a_batch_larger_than_the_set_is_refused(data):
    with pytest.raises(UserError, match="batch_size=11"):
        new(data, RunConfig(batch_size=11))


def test_unknown_device_is_one_line():
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="device=gpu7"):
        resolve_device("gpu7")


def test_record_finds_targets_and_medians():
    durations = [(5.0, True), (1.0, False), (3.0, False), (2.0, False), (9.0, True)]
    steps = [StepPoint(i + 1, 1.0, 0.1, 0.0, seconds, refresh) for i, (seconds, refresh) in enumerate(durations)]
    evaluations = [
        accuracy_point(2, 6.0, 1.0, 0.5, 0.9),
        accuracy_point(4, 11.0, 1.0, 0.8, 0.9),
        accuracy_point(5, 20.0, 1.0, 0.7, 1.0),
    ]
    record = History(steps, evaluations)
    assert record.first_reaching(0.5).step == 2
    assert record.first_reaching(0.75).step == 4
    assert record.first_reaching(0.81) is None
    assert (record.median_duration(refresh=False), record.median_duration(refresh=True)) == (2.0, 7.0)
    assert History(steps[1:4]).median_duration(refresh=True) is None
