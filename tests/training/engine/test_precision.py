"""Mixed precision beside a loop written out by hand; overflow skips a step, is counted, and does not go on for ever."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from small_network import network, small_data
from torch import nn
from torch.nn import functional

from torch_thor import THOR
from torch_thor.training import Callback, Run, RunConfig, UserError, train
from torch_thor.training.callbacks import MetricsFile, read_metrics
from torch_thor.training.data import epoch_order
from torch_thor.training.engine import precision
from torch_thor.training.tasks import ImageClassification

LR, BATCH = 0.1, 5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def data():
    return small_data()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def thor(model):
    return THOR(model, lr=0.01, damping=0.1, update_interval=2)


def new(data, make=sgd, **options):
    model = network()
    config = RunConfig(epochs=2, batch_size=BATCH, device="cpu", **options)
    return Run(model, make(model), ImageClassification(data, config), config)


def by_hand(data, dtype, scale):
    """Weights and losses of two epochs of SGD with momentum: autocast, a loss times `scale`, gradients over it."""
    model = network()
    velocity = [torch.zeros_like(parameter) for parameter in model.parameters()]
    losses = []
    for step in range(8):
        chosen = epoch_order(20, 0, step // 4)[BATCH * (step % 4) :][:BATCH]
        with torch.autocast("cpu", dtype):
            loss = functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen])
        gradients = torch.autograd.grad(loss * scale, list(model.parameters()))
        with torch.no_grad():
            for parameter, moving, gradient in zip(model.parameters(), velocity, gradients, strict=True):
                moving.mul_(0.9).add_(gradient / scale)
                parameter -= LR * moving
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    ("name", "loss_scale", "scale"), [("bf16", None, 1.0), ("fp16", 128.0, 128.0), ("fp16", None, 65536.0)]
)
def test_equals_a_loop_written_out(data, name, loss_scale, scale):
    record = train(run := new(data, precision=name, loss_scale=loss_scale))
    model, losses = by_hand(data, DTYPES[name], scale)
    assert [point.loss for point in record.steps] == losses
    assert not any(point.skipped for point in record.steps)
    for own, wanted in zip(run.model.parameters(), model.parameters(), strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-7)
    other, _ = by_hand(data, torch.bfloat16 if name == "fp16" else torch.float16, scale)
    pairs = zip(run.model.parameters(), other.parameters(), strict=True)
    assert any(not torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_a_small_gradient_survives_in_float16_only_with_a_scale():
    # d loss / d output is 1e-8 and less, which float16 rounds to 0; 65536 times that it does not
    def weight_gradient(loss_scale):
        torch.manual_seed(0)
        layer = nn.Linear(4, 2, bias=False)
        guard = precision.Precision("fp16", loss_scale, torch.device("cpu"))
        with guard.autocast():
            loss = layer(torch.ones(3, 4)).float().sum() * 1e-8
        guard.backward(loss)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        assert guard.step(optimizer)
        return layer.weight.grad

    assert torch.equal(weight_gradient(1.0), torch.zeros(2, 4))
    torch.testing.assert_close(weight_gradient(65536.0), torch.full((2, 4), 3e-8), rtol=1e-3, atol=0)


class Spoil(Callback):
    """Makes the gradients of some steps overflow, and looks at the weights before and after each."""

    def __init__(self, steps):
        self.steps, self.weights = steps, []

    def before_training(self, run):
        self._prepare(run)

    def after_step(self, run, point):
        self.weights.append(run.model[0].weight.detach().clone())
        self._prepare(run)

    def _prepare(self, run):
        if not hasattr(self, "clean"):
            self.clean = run.task.data.train_images.clone()
        run.task.data.train_images.copy_(self.clean)
        if run.step + 1 in self.steps:
            run.task.data.train_images.fill_(1e5)  # beyond float16


@pytest.mark.parametrize("make", [sgd, thor])
@pytest.mark.parametrize("loss_scale", [128.0, None])
def test_an_overflow_skips_one_step_and_is_counted(data, make, loss_scale):
    run = new(data, make, precision="fp16", loss_scale=loss_scale)
    start = run.model[0].weight.detach().clone()
    spoil = Spoil({1, 4, 5})
    record = train(run, [spoil])
    assert [point.step for point in record.steps if point.skipped] == [1, 4, 5]
    weights = [start, *spoil.weights]
    still = [torch.equal(before, after) for before, after in pairwise(weights)]
    assert [step for step, same in enumerate(still, 1) if same] == [1, 4, 5]
    scale = run.stepper.precision.scaler.get_scale()
    assert scale == (65536 / 2**3 if loss_scale is None else 128)
    assert all(torch.isfinite(weight).all() for weight in spoil.weights)


def test_a_fixed_scale_may_be_a_whole_number(data):
    run = new(data, precision="fp16", loss_scale=128)
    assert sum(point.skipped for point in train(run, [Spoil({2})]).steps) == 1
    assert run.stepper.precision.scaler.get_scale() == 128


def test_a_skipped_step_survives_the_metrics_file(data, tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    train(new(data, precision="fp16"), [Spoil({2}), metrics])
    metrics.close()
    assert [point.skipped for point in read_metrics(metrics.path).steps] == [False, True] + [False] * 6


@pytest.mark.parametrize("loss_scale", [128.0, None])
def test_too_many_overflows_in_a_row_are_an_error(data, monkeypatch, loss_scale):
    monkeypatch.setattr(precision, "MOST_SKIPPED", 3)
    record = train(new(data, precision="fp16", loss_scale=loss_scale), [Spoil({1, 2, 4, 5, 7, 8})])
    assert sum(point.skipped for point in record.steps) == 6  # never three in a row
    with pytest.raises(
        UserError, match=r"^3 consecutive steps overflowed float16, and the loss scale is \d+: lower lr, or"
    ):
        train(new(data, precision="fp16", loss_scale=loss_scale), [Spoil({3, 4, 5})])


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_without_a_scale_a_loss_that_is_not_finite_is_an_error(data, name):
    data.train_images[3] = float("inf")
    with pytest.raises(UserError, match=r"loss became nan at step [1234] "):
        train(new(data, precision=name))


def test_evaluation_is_in_float32(data):
    run = new(data, precision="fp16", eval_interval=1)
    evaluated = train(run).evaluations[-1].loss
    with torch.no_grad():
        exact = functional.cross_entropy(run.model(data.test_images), data.test_labels).item()
    assert evaluated == pytest.approx(exact, rel=1e-6)


def test_fp32_is_no_autocast_and_no_scale(data):
    plain, mixed = new(data), new(data, precision="bf16")
    assert plain.stepper.precision.state_dict() == mixed.stepper.precision.state_dict() == {}
    assert replace(plain.config, precision="bf16") == mixed.config
    model = network()
    optimizer = sgd(model)
    for step in range(8):
        chosen = epoch_order(20, 0, step // 4)[BATCH * (step % 4) :][:BATCH]
        optimizer.zero_grad()
        functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
    train(plain)
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), model.parameters(), strict=True))
