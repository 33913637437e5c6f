"""`metrics.jsonl`: what stands in a line, and a disk that is full."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from replaying import accuracy_point, replay, small_run
from torch_thor.training import History, RunConfig, StepPoint, UserError, train
from torch_thor.training.callbacks import MetricsFile, read_metrics
from torch_thor.training.callbacks import metrics_file as module
from torch_thor.training.checkpoints import Checkpoints, StopSignal, newest_whole

PLAN = RunConfig(epochs=2, batch_size=4)
FULL = Path("/dev/full")


def test_a_line_holds_all_that_was_measured(tmp_path):
    step = StepPoint(1, 2.5, 0.1, 0.5, 0.5, True, 4, 0.125, 0.03, skipped=False)
    evaluation = accuracy_point(1, 0.5, 1.0, 0.25, 0.5, 0.75, 0.5, 1.0)
    file = MetricsFile(tmp_path / "m.jsonl")
    replay(file, small_run(PLAN), History([step], [evaluation]))
    file.close()
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [
        {
            "kind": "step", "step": 1, "loss": 2.5, "lr": 0.1, "seconds": 0.5, "duration": 0.5, "refresh": True,
            "terms": 4, "waited": 0.125, "damping": 0.03, "skipped": False,
        },
        {
            "kind": "eval", "step": 1, "seconds": 0.5, "loss": 1.0, "top1": 0.25, "top5": 0.5,
            "averaged_loss": 0.75, "averaged_top1": 0.5, "averaged_top5": 1.0,
            "primary": "top1", "higher_is_better": True,
        },
    ]  # fmt: skip
    assert read_metrics(file.path) == History([step], [evaluation])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null(tmp_path, loss):
    file = MetricsFile(tmp_path / "m.jsonl")
    point = StepPoint(1, loss, 0.1, 0.5, 0.5, False, 4, skipped=True)
    replay(file, small_run(PLAN), History([point]))
    file.close()
    assert json.loads(file.path.read_text())["loss"] is None  # NaN is not JSON: other readers would refuse the file
    [read] = read_metrics(file.path).steps
    assert math.isnan(read.loss)
    assert {**asdict(read), "loss": 0} == {**asdict(point), "loss": 0}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to name what was flushed")
def test_what_a_resumed_run_writes_anew_is_on_the_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    synced = []
    really = module.os.fsync
    monkeypatch.setattr(
        module.os, "fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").readlink()), really(fd))
    )
    monkeypatch.setattr(Path, "rename", lambda me, to: synced.append("renamed"))
    file = MetricsFile(tmp_path / "m.jsonl")
    file.before_training(small_run(PLAN))
    file.close()
    assert synced == [tmp_path / ".writing-m.jsonl", "renamed"]


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("moment", ["a line", "a checkpoint", "the end"])
def test_a_full_disk_is_one_line_and_no_checkpoint(tmp_path, moment):
    run = small_run(PLAN)
    file = MetricsFile(tmp_path / "m.jsonl")
    stop = StopSignal()
    saving = Checkpoints(tmp_path / "c", file, stop, interval=2, keep=2, optimizer="sgd", recipe="")
    fills = file.before_training

    def fill(run):
        fills(run)
        file._file.close()
        file._file = FULL.open("w", buffering=1 if moment == "a line" else -1)

    file.before_training = fill
    said = r"m.jsonl cannot be written \(No space left on device\): free some disk space, then continue with --resume"
    if moment == "the end":
        train(run, [file])
    else:
        with pytest.raises(UserError, match=said):
            train(run, [file, saving])
        assert run.step == (1 if moment == "a line" else 2)
    with pytest.raises(UserError, match=said):
        file.close()  # what is in its buffer has no room either
    file.close()
    assert newest_whole(tmp_path / "c", pytest.fail) is None


def test_no_folder_to_write_in_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"gone/m.jsonl cannot be written \(No such file"):
        MetricsFile(tmp_path / "gone" / "m.jsonl").before_training(small_run(PLAN))
