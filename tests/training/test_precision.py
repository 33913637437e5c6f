"""Mixed precision and averages equal loops written out; an overflow skips a step."""

import copy
from itertools import pairwise

import noisy
import pytest
import torch
from torch.nn import functional as F

from tiny import assert_same
from torch_thor.training import precision
from torch_thor.training.evaluation import evaluate
from torch_thor.training.loop import Observer, train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipes import load_recipe
from torch_thor.training.run import build
from torch_thor.training.tasks.opening import open_task


class Spoiled(noisy.Noisy):
    """Noisy in float32; the rows of some steps overflow float16."""

    def model(self):
        return self.kind()

    def batch(self, seed, part):
        rows, labels = super().batch(seed, part)
        return (rows * (1e6 if seed + 1 in self.steps else 1)).float(), labels


class Kept(Observer):
    """Copies of the weights before and after each step, and whether it was skipped or refreshed."""

    def __init__(self, run):
        self.states, self.skipped, self.decided = [copy.deepcopy(run.model.state_dict())], [], []

    def step(self, run, point):
        self.states.append(copy.deepcopy(run.model.state_dict()))
        self.skipped.append(point.skipped)
        self.decided.append(bool(point.events))


def trained(name="sgd", kind=noisy.Quiet, steps=(), **given):
    task = Spoiled(kind)
    task.steps = steps
    recipe = noisy.recipe(optimizers={"sgd": {"lr": 0.1}, "thor": noisy.SETTINGS}, **given)
    run = build(recipe, name, task, Ranks())
    train(run, [kept := Kept(run)])
    return run, kept


@pytest.mark.parametrize(
    ("name", "loss_scale", "scale"), [("fp32", None, 1), ("bf16", None, 1), ("fp16", 128, 128)]
)
def test_equals_a_loop_written_out(name, loss_scale, scale):
    run, kept = trained(precision=name, loss_scale=loss_scale)
    model, velocity = noisy.Quiet(), {}
    model.load_state_dict(kept.states[0])
    for step in range(noisy.STEPS):
        rows, labels = run.task.batch(step, slice(None))
        with torch.autocast("cpu", precision.PRECISIONS[name], enabled=name != "fp32"):
            loss = F.cross_entropy(model(rows), labels)
        gradients = torch.autograd.grad(loss * scale, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                velocity[parameter] = 0.9 * velocity.get(parameter, 0) + gradient / scale
                parameter -= 0.1 * velocity[parameter]
    for found, wanted in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "thor"])
@pytest.mark.parametrize("loss_scale", [128, None])
def test_an_overflow_skips_one_step(name, loss_scale):
    run, kept = trained(name, steps=(1, 3, 4), precision="fp16", loss_scale=loss_scale)
    assert [step for step, skipped in enumerate(kept.skipped, 1) if skipped] == [1, 3, 4]
    refreshes = [2, 8, 12] if name == "thor" else []
    assert [step for step, decided in enumerate(kept.decided, 1) if decided] == refreshes
    weights = [state["layers.0.weight"] for state in kept.states]
    assert [torch.equal(*pair) for pair in pairwise(weights)] == kept.skipped
    assert run.precision.scaler.get_scale() == (65536 / 2**3 if loss_scale is None else 128)
    # skipped steps do not enter the average
    states = zip(kept.states[1:], kept.skipped, strict=True)
    assert_average(run, [state for state, skipped in states if not skipped])


def assert_average(run, states):
    for name, found in run.average.module.named_parameters():
        wanted = states[0][name].double()
        for state in states[1:]:
            wanted = 0.5 * wanted + 0.5 * state[name].double()
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "thor"])
def test_the_average_is_the_recurrence_and_does_not_change_the_training(name):
    run, kept = trained(name, kind=noisy.Net)
    assert_average(run, kept.states[1:])
    assert run.average.module.body[1].num_batches_tracked == noisy.STEPS  # a whole number is copied
    found, _ = evaluate(run.task, run.average.module, run.ranks)
    assert found == run.score.averaged != run.score.metrics
    # THOR's hooks stay on the network
    assert not any(module._forward_hooks for module in run.average.module.modules())
    assert_same(kept.states, trained(name, kind=noisy.Net, ema_decay=None)[1].states)


def test_factors_of_sampled_labels_do_not_have_the_loss_scale():
    words = "optimizer=thor epochs=1 batch_size=1024 device=cpu fisher=sampled split_dim=null"
    found = {}
    for kind in ("fp32", "bf16", "fp16"):
        recipe = load_recipe("digits", [*words.split(" "), f"precision={kind}"])
        run = build(recipe, "thor", open_task(recipe, torch.device("cpu"), print), Ranks())
        train(run)
        found[kind] = {name: layer.factors()[1] for name, layer in run.optimizer.curvature.items()}
    for name, G in found["fp32"].items():
        for kind in ("bf16", "fp16"):
            assert 0 < (found[kind][name] - G).norm() < 0.05 * G.norm(), (kind, name)
