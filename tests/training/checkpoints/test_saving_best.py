"""The best checkpoint, and training that ends at an accuracy: kept whole, through kills, damage and resumes."""

import os
import shutil
from dataclasses import replace

import pytest
import torch

from replaying import accuracy_point, small_run
from torch_thor.training import Callback, History, RunConfig, StoppedError, UserError, train
from torch_thor.training.callbacks import MetricsFile
from torch_thor.training.checkpoints import (
    Checkpoints,
    StopSignal,
    newest_whole,
    open_checkpoint,
    restore,
    saving,
)
from torch_thor.training.tasks import ImageClassification

PLAN = RunConfig(epochs=4, batch_size=4, eval_interval=2)  # twelve steps
ACCURACIES = [0.1, 0.5, 0.3, 0.5, 0.7, 0.6]  # after steps 2, 4, ..., 12: the best are 2, 4 and 10


best, checkpoint = saving.best, saving.checkpoint  # in whose place a test puts its own


class Die(Callback):
    def __init__(self, step):
        self.step = step

    def after_step(self, run, point):
        if point.step == self.step:
            raise SystemExit


class Keep(Callback):
    """Copies of the weights after each step."""

    def __init__(self):
        self.weights = {}

    def at_boundary(self, run):
        self.weights[run.step] = run.model.weight.detach().clone()


class Told(ImageClassification):
    """A task whose accuracies are told beforehand."""

    run = None

    def measure(self, model, batch):
        accuracy = ACCURACIES[self.run.step // 2 - 1]
        means = {"loss": 1.0, "top1": accuracy, "top5": 1.0}
        return {name: torch.tensor(len(batch[1]) * mean, dtype=torch.float64) for name, mean in means.items()}


def told_run(config):
    run = small_run(config, task=Told)
    run.task.run = run
    return run


@pytest.fixture
def go(tmp_path):
    def go(config=PLAN, *, interval=3, keep=2, keep_best=True, resume=False, callbacks=(), stop=None):
        run = told_run(config)
        file = MetricsFile(tmp_path / "m.jsonl")
        folder = tmp_path / "c"
        if resume:
            restore(run, newest_whole(folder, lambda line: None), file.path, pytest.fail)
        begun = run.step
        saving = Checkpoints(
            folder, file, stop or StopSignal(), interval=interval, keep=keep, optimizer="sgd", recipe="",
            keep_best=keep_best,
        )  # fmt: skip
        try:
            train(run, [file, *callbacks, saving])
        finally:
            file.close()
        return run, begun

    return go


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def loaded(path):
    model = torch.nn.Linear(4, 3)
    open_checkpoint(path).load_weights(model)
    return model.weight


def test_the_best_is_kept_beside_the_newest(tmp_path, go):
    weights = Keep()
    go(callbacks=[weights])
    assert names(tmp_path / "c") == ["best", "step-00000009", "step-00000012"]
    assert names(tmp_path / "c" / "best") == ["step-00000010"]  # no checkpoint was due there
    assert torch.equal(loaded(tmp_path / "c/best/step-00000010"), weights.weights[10])
    assert torch.equal(loaded(tmp_path / "c/step-00000012"), weights.weights[12])


def test_one_that_was_due_is_not_written_twice(tmp_path, go, monkeypatch):
    written = []
    really = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda folder, *a, **k: written.append(k["step"]) or really(folder, *a, **k)
    )
    go(interval=5)
    assert written == [2, 4, 5, 10, 12]
    assert names(tmp_path / "c/best") == ["step-00000010"]
    for file in (tmp_path / "c/step-00000010").iterdir():
        assert file.stat().st_ino == (tmp_path / "c/best/step-00000010" / file.name).stat().st_ino


def test_a_file_system_without_links(tmp_path, go, monkeypatch):
    def no_link(*args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    weights = Keep()
    go(interval=5, callbacks=[weights])
    shutil.rmtree(tmp_path / "c/step-00000010")
    assert torch.equal(loaded(tmp_path / "c/best/step-00000010"), weights.weights[10])


def test_none_is_kept_that_nobody_wants(tmp_path, go):
    go(keep_best=False)
    assert names(tmp_path / "c") == ["step-00000009", "step-00000012"]


@pytest.mark.parametrize("at", range(1, 13))
def test_killed_and_resumed_at_any_step(tmp_path, go, at):
    whole, _ = go()
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(SystemExit):
        go(callbacks=[Die(at)])
    if at == 1:
        return
    resumed, begun = go(resume=True) if newest_whole(tmp_path / "c", pytest.fail) else go()
    assert begun == max([0, *(s for s in (2, 3, 4, 6, 9, 10) if s < at)])  # the best one counts among the newest
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert names(tmp_path / "c") == ["best", "step-00000009", "step-00000012"]
    assert names(tmp_path / "c/best") == ["step-00000010"]


@pytest.mark.parametrize("moment", ["mkdir", "link", "flush", "rename", "remove"])
def test_killed_while_the_best_is_replaced(tmp_path, go, monkeypatch, moment):
    go(replace(PLAN, epochs=2), interval=4)  # step 4 is the best of six
    for step in (4, 6):
        open_checkpoint(tmp_path / f"c/step-0000000{step}")

    def die(*args, **options):
        raise SystemExit

    with monkeypatch.context() as patch:
        if moment == "mkdir":
            patch.setattr(type(tmp_path), "mkdir", die)
        elif moment == "link":
            calls = [0]
            link = os.link
            patch.setattr(os, "link", lambda *a: link(*a) if not calls.append(0) and len(calls) < 4 else die())
        elif moment == "flush":
            patch.setattr(os, "fsync", die)
        elif moment == "rename":
            patch.setattr(type(tmp_path), "rename", die)
        else:
            patch.setattr(best, "remove_others", die)
        with pytest.raises(SystemExit):
            best.keep(tmp_path / "c/step-00000006")
    whole = [path for path in (tmp_path / "c/best").glob("step-*") if open_checkpoint(path)]
    assert [path.name for path in whole][:1] in (["step-00000004"], ["step-00000006"])
    best.keep(tmp_path / "c/step-00000006")
    assert names(tmp_path / "c/best") == ["step-00000006"]
    open_checkpoint(tmp_path / "c/best/step-00000006")


def test_killed_before_the_best_was_named(tmp_path, go, monkeypatch):
    def die(path):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(best, "keep", die)
        with pytest.raises(SystemExit):
            go(interval=2)
    assert names(tmp_path / "c") == ["step-00000002"]
    go(resume=True, interval=2, callbacks=[Check(tmp_path)])
    assert names(tmp_path / "c/best") == ["step-00000010"]


class Check(Callback):
    def __init__(self, folder):
        self.folder = folder

    def after_step(self, run, point):
        if point.step == 3:
            assert names(self.folder / "c/best") == ["step-00000002"]


def test_a_damaged_best_is_passed_over_and_replaced(tmp_path, go):
    with pytest.raises(SystemExit):
        go(callbacks=[Die(11)])
    (tmp_path / "c/best/step-00000010/model.safetensors").write_bytes(b"")
    _, begun = go(resume=True)
    assert begun == 9
    assert names(tmp_path / "c/best") == ["step-00000010"]
    open_checkpoint(tmp_path / "c/best/step-00000010")


def test_a_damaged_newer_one_does_not_push_out_the_whole(tmp_path, go):
    go(keep=1)
    (tmp_path / "c/step-00000012/model.safetensors").write_bytes(b"")
    shutil.rmtree(tmp_path / "c/best")
    checkpoint.save(tmp_path / "c", torch.nn.Linear(4, 3), {}, step=9, optimizer="sgd", recipe="", keep=1)
    assert newest_whole(tmp_path / "c", lambda line: None).step == 9


def test_no_room_for_the_best_is_one_line(tmp_path, go, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match=r"best/step-00000002 cannot be written \(No space left on device\): make room"):
        go(interval=2)
    open_checkpoint(tmp_path / "c/step-00000002")


def test_a_signal_at_a_new_best(tmp_path, go):
    class Signal(Callback):
        def after_evaluation(self, run, point):
            stop.received = point.step == 4

    stop = StopSignal()
    with pytest.raises(StoppedError, match="step 4"):
        go(callbacks=[Signal()], stop=stop)
    assert names(tmp_path / "c") == ["best", "step-00000003", "step-00000004"]
    assert names(tmp_path / "c/best") == ["step-00000004"]


def test_training_ends_at_an_accuracy_and_saves(tmp_path, go):
    run, _ = go(replace(PLAN, stop_at=0.5), interval=100)
    assert (run.step, run.done, run.reached) == (4, True, True)
    assert [point.step for point in run.record.evaluations] == [2, 4]
    assert names(tmp_path / "c") == ["best", "step-00000004"]
    again, begun = go(replace(PLAN, stop_at=0.5), interval=100, resume=True)
    assert (begun, again.step) == (4, 4)  # a resumed run knows that it has arrived


def test_an_accuracy_that_is_never_reached(go):
    run, _ = go(replace(PLAN, stop_at=0.71))
    assert (run.step, run.reached) == (12, False)


def test_the_averaged_weights_decide_where_there_are_any():
    assert (
        History([], [accuracy_point(2, 0, 1, 0.9, 1, 1, 0.5, 1), accuracy_point(4, 0, 1, 0.4, 1, 1, 0.6, 1)]).best.step
        == 4
    )


@pytest.mark.parametrize(("epochs", "every", "steps"), [(4, 1, [3, 6, 9, 12]), (4, 2, [6, 12]), (4, 3, [9, 12])])
def test_evaluation_every_so_many_epochs(epochs, every, steps):
    run = told_run(RunConfig(epochs=epochs, batch_size=4, eval_epochs=every))
    assert [point.step for point in train(run).evaluations] == steps
