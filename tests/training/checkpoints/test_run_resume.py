"""A resumed run equals one that never stopped, bit for bit, wherever it stopped."""

from dataclasses import replace

import pytest
import torch

from command_line import assert_refused, checkpoints, newest
from resuming import Noisy, go
from tiny import assert_same
from torch_thor.training import Callback, StoppedError, load_recipe, parse_recipe, recipe_yaml, train
from torch_thor.training import image_run as new_run
from torch_thor.training.callbacks import MetricsFile, read_metrics
from torch_thor.training.checkpoints import Checkpoints, StopSignal, newest_whole, restore
from torch_thor.training.data import DataBundle, DataSpec, load_data
from torch_thor.training.models import MODELS

STEPS_PER_EPOCH = 6


@pytest.fixture(scope="module")
def data():
    full = load_data(DataSpec("digits"))
    return DataBundle(full.train_images[:200], full.train_labels[:200], full.test_images, full.test_labels, 10)


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.setitem(MODELS, "noisy", Noisy)
    words = ["model=noisy", "epochs=3", "batch_size=32", "eval_interval=4", "schedule.warmup_epochs=0.5"]
    words += ["damping_schedule.kind=exponential", "damping_schedule.rate=0.5", "optimizers.thor.update_interval=4"]
    words += [
        "optimizers.thor.trace_thresholds=[0.05,0.001]",
        "optimizers.thor.factor_decay=0.5",
        "optimizers.thor.lr=0.005",
    ]
    return load_recipe("digits", words)


def untimed(record):
    steps = [replace(point, seconds=0, duration=0, waited=0) for point in record.steps]
    return steps, record.refreshes, [replace(point, seconds=0) for point in record.evaluations]


# In mid-epoch, the optimizers of this package, and two of torch's: what its others save passes the same lines. THOR,
# which has more state, also at the first step, at an evaluation, at a refresh, at the end of an epoch, before the last.
RESUMED = ("thor", "thor-muon", "sgd", "adamw", "muon", "lamb", "agc-sgd")
STOPS = [*((name, 9) for name in RESUMED), *(("thor", stop_at) for stop_at in (1, 4, 6, 17)), ("thor-muon", 4)]


@pytest.mark.parametrize(("name", "stop_at"), STOPS)
def test_resumed_equals_never_stopped(tmp_path, recipe, data, name, stop_at):
    assert_resumes(tmp_path, recipe, data, name, stop_at)


@pytest.mark.parametrize("stop_at", [1, 4, 6])
def test_a_resumed_run_draws_the_labels_of_the_one_that_never_stopped(tmp_path, recipe, data, stop_at):
    settings = replace(recipe.optimizers["thor"], fisher="sampled")
    sampled = replace(recipe, optimizers={**recipe.optimizers, "thor": settings}, accumulation=2)
    assert_resumes(tmp_path, sampled, data, "thor", stop_at)


def assert_resumes(tmp_path, recipe, data, name, stop_at):
    whole = go(tmp_path / "whole", recipe, name, data)
    random = torch.get_rng_state()
    with pytest.raises(StoppedError, match=f"step {stop_at}"):
        go(tmp_path / "cut", recipe, name, data, stop_at=stop_at)
    resumed = go(tmp_path / "cut", recipe, name, data, resume=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert_same(whole.optimizer.state_dict(), resumed.optimizer.state_dict())
    assert untimed(whole.record) == untimed(resumed.record)
    assert untimed(read_metrics(tmp_path / "cut" / "metrics.jsonl")) == untimed(whole.record)
    assert resumed.step == 3 * STEPS_PER_EPOCH
    assert resumed.seconds >= resumed.record.steps[-1].duration


class Killed(Callback):
    def after_step(self, run, point):
        if point.step == 13:
            raise SystemExit


def test_killed_without_warning_goes_on_from_the_checkpoint_before(tmp_path, recipe, data):
    whole = go(tmp_path / "whole", recipe, "sgd", data)
    run = new_run(recipe, "sgd", data)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    keep = Checkpoints(
        tmp_path / "checkpoints", metrics, StopSignal(), interval=5, keep=2, optimizer="sgd", recipe=recipe_yaml(recipe)
    )
    with pytest.raises(SystemExit):
        train(run, [metrics, keep, Killed()])
    metrics.close()
    with metrics.path.open("a") as file:
        file.write('{"kind": "step", "st')  # the kill came in the middle of a line
    assert newest_whole(tmp_path / "checkpoints", pytest.fail).step == 10
    resumed = go(tmp_path, recipe, "sgd", data, resume=True)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert untimed(read_metrics(metrics.path)) == untimed(whole.record)


@pytest.mark.slow
def test_what_changes_no_step_may_change_on_resume(run, tmp_path):
    words = ["train", "digits", "optimizer=thor", "epochs=2", "batch_size=128"]
    assert run(*words, "--out", "whole")[0] == 0
    assert run(*words, "stop_at=0.05", "--out", "cut")[0] == 0
    assert checkpoints(tmp_path / "cut", "thor")[-1] == 11
    changed = ["stop_at=null", "targets=[0.5]", "keep_checkpoints=5", "data.workers.count=7"]
    assert run("train", "--resume", *changed, "--out", "cut")[0] == 0
    stored = parse_recipe((tmp_path / "cut/recipe.yaml").read_text(), "digits", [])
    assert stored == load_recipe("digits", [*words[2:], *changed])
    both = [newest(tmp_path / folder, "thor") for folder in ("whole", "cut")]
    assert [path.name for path in both] == ["step-00000022"] * 2
    weights = [path.joinpath("model.safetensors").read_bytes() for path in both]
    assert weights[0] == weights[1]
    refused = run("train", "--resume", "label_smoothing=0.1", "--out", "cut")
    assert_refused(refused, "other settings (label_smoothing: 0.0 -> 0.1)")


def test_metrics_that_lost_steps_come_back_from_the_checkpoint(tmp_path, recipe, data):
    with pytest.raises(StoppedError):
        go(tmp_path, recipe, "sgd", data, stop_at=7)
    metrics = tmp_path / "metrics.jsonl"
    whole = metrics.read_bytes()
    for damage, said in (
        (b"".join(whole.splitlines(keepends=True)[:3]), "is truncated"),
        (whole.replace(b'"step": 5', b'"step": 6', 1), "is damaged in line 6"),  # after the evaluation of step 4
        (None, "cannot be read (No such file or directory)"),
    ):
        metrics.unlink() if damage is None else metrics.write_bytes(damage)
        run, heard = new_run(recipe, "sgd", data), []
        restore(run, newest_whole(tmp_path / "checkpoints", pytest.fail), metrics, heard.append)
        assert heard == [f"{metrics} {said}: it is restored from the copy in {tmp_path / 'checkpoints/step-00000007'}"]
        file = MetricsFile(metrics)
        file.before_training(run)
        file.close()
        assert metrics.read_bytes() == whole


def test_initial_weights_are_a_function_of_the_seed(recipe, data):
    first, again = (new_run(recipe, "sgd", data).model.state_dict() for _ in range(2))
    assert_same(first, again)
    other = new_run(replace(recipe, seed=1), "sgd", data).model.state_dict()
    assert not torch.equal(first["head.weight"], other["head.weight"])
