"""What stands in the event files, read back with TensorBoard's own reader."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from replaying import accuracy_point, replay, small_run
from torch_thor import THOR
from torch_thor.training import History, RefreshPoint, RunConfig, StepPoint, UserError, train
from torch_thor.training.callbacks import tensorboard

PLAN = RunConfig(epochs=3, batch_size=3, eval_interval=6)  # 12 steps


REFRESHES = [
    RefreshPoint(1, "a", "update", None, 1.0), RefreshPoint(1, "b", "update", None, 1.0),
    RefreshPoint(3, "a", "keep", 0.25, 1.0), RefreshPoint(3, "b", "stop", 0.0, 1.0),
    RefreshPoint(5, "a", "failed", None, None), RefreshPoint(7, "a", "update", 0.5, 2.0),
    RefreshPoint(9, "a", "stop", 0.125, 2.0),
]  # fmt: skip


def thor_run():
    return small_run(PLAN, lambda model: THOR(model, lr=0.1, damping=0.1, update_interval=2))


@pytest.fixture(scope="module")
def record():
    record = train(thor_run())
    assert any(point.refresh for point in record.steps)
    return History(record.steps, record.evaluations, REFRESHES)


def scalars(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def write(folder, run, told, interval, start=0):
    writer = tensorboard.TensorBoard(folder, interval)
    replay(writer, run, told, start)
    writer.close()


def test_every_step_of_a_short_run(tmp_path, record):
    write(tmp_path, thor_run(), record, 100)
    read = scalars(tmp_path)
    for tag, values in {
        "train/loss": [p.loss for p in record.steps],
        "train/lr": [p.lr for p in record.steps],
        "train/damping": [p.damping for p in record.steps],
        "train/images_per_second": [p.terms / p.duration for p in record.steps],
        "train/data_wait_seconds": [p.waited for p in record.steps],
        "test/top1": [p.top1 for p in record.evaluations],
    }.items():
        assert list(read[tag].values()) == pytest.approx(values)
    for kind, refresh in (("ordinary", False), ("refresh", True)):
        expected = {p.step: p.duration for p in record.steps if p.refresh == refresh}
        assert read[f"train/{kind}_step_seconds"] == pytest.approx(expected)
    assert read["trace_change/a"] == {3: 0.25, 7: 0.5, 9: 0.125}
    assert read["trace_change/b"] == {3: 0.0}
    assert not [tag for tag in read if "skipped" in tag or "averaged" in tag]


@pytest.fixture
def stretches(monkeypatch):
    monkeypatch.setattr(tensorboard, "FULL_CURVE", 1)  # as if the training were long


def test_a_stretch_of_steps_is_one_point(tmp_path, record, stretches):
    write(tmp_path, thor_run(), record, 5)
    read = scalars(tmp_path)
    bounds = {5: (0, 5), 10: (5, 10), 12: (10, 12)}  # what is left over at the end too
    for end, (after, to) in bounds.items():
        steps = [p for p in record.steps if after < p.step <= to]
        assert read["train/loss"][end] == pytest.approx(sum(p.loss for p in steps) / len(steps))
        assert read["train/images_per_second"][end] == pytest.approx(
            sum(p.terms for p in steps) / sum(p.duration for p in steps)
        )
    assert read["thor/refreshed"] == {5: 2, 10: 1, 12: 0}
    assert read["thor/kept"] == {5: 1, 10: 0, 12: 0}
    assert read["thor/failed"] == {5: 1, 10: 0, 12: 0}
    assert read["thor/stopped"] == {5: 1, 10: 2, 12: 2}  # so far
    assert read["trace_change/a"] == {10: 0.125}  # the latest; the failed one has none
    assert read["trace_change/b"] == {5: 0.0}
    assert set(read["train/loss"]) == set(bounds)


@pytest.mark.parametrize("start", [3, 4, 5, 7])
def test_a_resumed_run_writes_what_an_uninterrupted_one_does(tmp_path, record, stretches, start):
    write(tmp_path / "whole", thor_run(), record, 5)
    write(tmp_path / "cut", thor_run(), record.up_to(start + 1), 5)  # one more than the checkpoint knows
    [first] = (tmp_path / "cut").iterdir()
    first.rename(first.with_name("events.out.tfevents.0"))  # the reader goes by names, and they by whole seconds
    write(tmp_path / "cut", thor_run(), record, 5, start)
    assert scalars(tmp_path / "cut") == scalars(tmp_path / "whole")


def test_averaged_weights_and_skipped_steps(tmp_path):
    run = small_run(RunConfig(epochs=1, batch_size=4))
    object.__setattr__(run.config, "precision", "fp16")
    told = History(
        [StepPoint(step, 1.0, 0.1, 1.0, 1.0, False, 4, skipped=step == 2) for step in (1, 2, 3)],
        [accuracy_point(3, 3.0, 1.0, 0.5, 0.75, 0.5, 0.625, 0.875)],
    )
    write(tmp_path, run, told, None)
    read = scalars(tmp_path)
    assert read["train/skipped"] == {1: 0, 2: 1, 3: 0}
    assert [read[f"averaged/{name}"] for name in ("loss", "top1", "top5")] == [{3: 0.5}, {3: 0.625}, {3: 0.875}]
    assert not [tag for tag in read if "thor" in tag or "damping" in tag]


def test_a_long_training_makes_a_small_file(tmp_path):
    run = small_run(RunConfig(epochs=1, batch_size=4))
    run.total_steps = 225_180  # ResNet-50 on ImageNet, batch 256, 45 epochs
    writer = tensorboard.TensorBoard(tmp_path, 100)
    writer.before_training(run)
    writer.close()
    assert writer._every == 100
    assert tensorboard.TensorBoard(tmp_path, None)._every == 1


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/events cannot be written \(.*\): make room"):
        tensorboard.TensorBoard(tmp_path / "file" / "events", 1).before_training(small_run(PLAN))
