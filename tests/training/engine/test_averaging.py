"""The average is the recurrence written out; it is evaluated, saved, and goes on bit for bit; when training ends."""

import copy
import math

import pytest
import torch
from safetensors.torch import load_file

from command_line import state
from resuming import Noisy, go
from tiny import assert_same
from torch_thor.training import Callback, StoppedError, evaluate, load_recipe, train
from torch_thor.training import image_run as new_run
from torch_thor.training.callbacks import read_metrics
from torch_thor.training.checkpoints import newest_whole
from torch_thor.training.data import DataBundle, DataSpec, load_data
from torch_thor.training.models import MODELS


@pytest.fixture(scope="module")
def data():
    full = load_data(DataSpec("digits"))
    return DataBundle(full.train_images[:96], full.train_labels[:96], full.test_images[:50], full.test_labels[:50], 10)


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.setitem(MODELS, "noisy", Noisy)

    def make(*words):
        always = ["model=noisy", "epochs=4", "batch_size=32", "optimizers.thor.update_interval=3", "device=cpu"]
        return load_recipe("digits", [*always, *words])

    return make


class Keeper(Callback):
    """Copies of the network's state after each step."""

    def __init__(self):
        self.states = []

    def after_step(self, run, point):
        self.states.append(copy.deepcopy(run.model.state_dict()))


@pytest.mark.parametrize("decay", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["sgd", "thor"])
def test_equals_the_recurrence(recipe, data, optimizer, decay):
    run = new_run(recipe(f"ema_decay={decay}"), optimizer, data)
    train(run, [keeper := Keeper()])
    wanted = {name: value.double() for name, value in keeper.states[0].items()}
    for weights in keeper.states[1:]:
        for name in wanted:
            wanted[name] = decay * wanted[name] + (1 - decay) * weights[name].double()
    average = run.average.module.state_dict()
    assert average.keys() == wanted.keys() == run.model.state_dict().keys()
    for name, value in average.items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(average["head.weight"], run.model.state_dict()["head.weight"]) or decay == 0
    assert not any(module._forward_hooks for module in run.average.module.modules())  # THOR's stay on the network


@pytest.mark.parametrize(("precision", "spoiled", "count"), [("fp16", 1e5, None), ("fp32", math.inf, 4)])
def test_a_skipped_step_leaves_the_average_as_it_is(recipe, data, precision, spoiled, count):
    """Of `precision=fp16`, and of THOR with `nonfinite="skip"`: one image is spoiled, once in each epoch."""
    images = data.train_images.clone()
    images[5] = spoiled
    run = new_run(
        recipe("ema_decay=0.9", f"precision={precision}"),
        "thor",
        DataBundle(images, *[getattr(data, key) for key in KEYS], 10),
    )
    run.optimizer.nonfinite = "skip"
    record = train(run, [keeper := Keeper()])
    skipped = [point.skipped for point in record.steps]
    assert 0 < sum(skipped) < len(skipped)
    assert count is None or sum(skipped) == count
    first, *rest = [weights for weights, skip in zip(keeper.states, skipped, strict=True) if not skip]
    for name, average in run.average.module.named_parameters():
        wanted = first[name].double()
        for weights in rest:
            wanted = 0.9 * wanted + 0.1 * weights[name].double()
        torch.testing.assert_close(average.double(), wanted, rtol=1e-5, atol=1e-6)


def test_the_average_leaves_training_alone(recipe, data):
    train(plain := new_run(recipe(), "thor", data))
    train(with_average := new_run(recipe("ema_decay=0.9"), "thor", data))
    assert_same(plain.model.state_dict(), with_average.model.state_dict())
    assert plain.average is None
    assert [point.averaged_top1 for point in plain.record.evaluations] == [None] * 4


def test_the_average_is_evaluated_beside_the_weights(recipe, data):
    run = new_run(recipe("ema_decay=0.8"), "sgd", data)
    point = train(run).evaluations[-1]
    model = Noisy(1, 10)
    for weights, loss, top1, top5 in (
        (run.model.state_dict(), point.loss, point.top1, point.top5),
        (run.average.module.state_dict(), point.averaged_loss, point.averaged_top1, point.averaged_top5),
    ):
        model.load_state_dict(weights)
        score = evaluate(run.task, model, run.streams.evaluation).metrics
        assert (score["top1"], score["top5"]) == (top1, top5)
        assert score["loss"] == pytest.approx(loss, rel=1e-6)
    assert point.averaged_loss != point.loss
    assert point.value == point.averaged_top1


# the average and the loss scale know nothing of the optimizer: each stop is with one of them
@pytest.mark.parametrize(("name", "stop_at"), [("sgd", 1), ("thor", 7)])
@pytest.mark.parametrize(
    "words",
    [
        ["ema_decay=0.9"],
        ["ema_decay=0.9", "precision=bf16", "accumulation=3"],
        ["ema_decay=0.9", "precision=fp16"],
        ["precision=fp16", "loss_scale=128.0"],
    ],
    ids=["average", "bf16-parts", "fp16-dynamic", "fp16-fixed"],
)
def test_resumed_equals_never_stopped(tmp_path, recipe, data, name, stop_at, words):
    recipe = recipe(*words)
    if "precision=fp16" in words:  # the first steps overflow, so the scale is not what it began with
        data = DataBundle(data.train_images * 300, *[getattr(data, key) for key in KEYS], 10)
    whole = go(tmp_path / "whole", recipe, name, data)
    with pytest.raises(StoppedError, match=f"step {stop_at}"):
        go(tmp_path / "cut", recipe, name, data, stop_at=stop_at)
    resumed = go(tmp_path / "cut", recipe, name, data, resume=True)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    if whole.average is not None:
        assert_same(whole.average.state_dict(), resumed.average.state_dict())
    ends = [tmp_path / folder / "checkpoints/step-00000012" for folder in ("whole", "cut")]
    assert_same(*map(state, ends))
    for weights in ends[0].glob("*.safetensors"):
        assert weights.read_bytes() == (ends[1] / weights.name).read_bytes()
    losses = [[point.loss for point in read_metrics(end.parents[1] / "metrics.jsonl").steps] for end in ends]
    assert losses[0] == losses[1]
    assert (ends[0] / "averaged.safetensors").exists() == ("ema_decay=0.9" in words)


KEYS = ("train_labels", "test_images", "test_labels")


def test_the_average_is_saved(tmp_path, recipe, data):
    run = go(tmp_path / "run", recipe("ema_decay=0.9"), "sgd", data)
    saved = load_file(tmp_path / "run/checkpoints/step-00000012/averaged.safetensors")
    assert_same(dict(saved), dict(run.average.module.state_dict()))


@pytest.mark.parametrize(("words", "at"), [(["ema_decay=0.99"], "averaged_top1"), ([], "top1")])
def test_training_ends_at_the_accuracy_asked_for(tmp_path, recipe, data, words, at):
    free = go(tmp_path / "free", recipe("epochs=12", *words), "sgd", data).record.evaluations
    goal = max(getattr(point, at) for point in free[:8])
    first = next(point.step for point in free if getattr(point, at) >= goal)
    assert first < 36
    run = go(tmp_path / "ended", recipe("epochs=12", f"stop_at={goal}", *words), "sgd", data)
    assert (run.step, run.done, run.total_steps) == (first, True, 36)
    assert newest_whole(tmp_path / "ended/checkpoints", pytest.fail).step == first
    before = (tmp_path / "ended/metrics.jsonl").read_bytes()
    again = go(tmp_path / "ended", recipe("epochs=12", f"stop_at={goal}", *words), "sgd", data, resume=True)
    assert again.step == first
    assert (tmp_path / "ended/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "steps"),
    [(["eval_epochs=2"], [6, 12]), (["eval_epochs=3"], [9, 12]), (["eval_epochs=2", "eval_interval=5"], [5, 10, 12])],
)
def test_evaluates_every_so_many_epochs_and_at_the_end(recipe, data, words, steps):
    assert [point.step for point in train(new_run(recipe(*words), "sgd", data)).evaluations] == steps
