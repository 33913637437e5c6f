"""What a training writes and says while it runs: the metrics file, TensorBoard's scalars, lines, bars and profiles."""

import io
import json
import math
import os
from collections import Counter

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from torch_thor import THOR, ThorMuon
from torch_thor.curvature.refresh import Decision, RefreshEvent
from torch_thor.training import observers, profiling
from torch_thor.training.errors import UserError
from torch_thor.training.loop import Observer, Point, Run, Score, train
from torch_thor.training.observers import Metrics, TensorBoard, facts
from torch_thor.training.parallel import Ranks, RankWeight
from torch_thor.training.precision import Precision
from torch_thor.training.profiling import Profiler
from torch_thor.training.progress import Bar, Lines
from torch_thor.training.recipe import Recipe
from torch_thor.training.summary import read
from torch_thor.training.tasks.images import ImageClassification
from torch_thor.training.tasks.task import Loss, Terms


class Task:
    """Labels of nine vectors; three steps are an epoch."""

    unit, metrics, steps_per_epoch, samples = "images", ImageClassification.metrics, 3, 9

    def batches(self, ranks, start):
        generator = torch.Generator().manual_seed(start)
        while True:
            yield torch.randn(4, 5, generator=generator), torch.arange(4) % 3

    def held_out(self, ranks):
        return [(next(self.batches(ranks, 0)), True)]

    def terms(self, batch):
        return Terms(4)

    def loss(self, net, batch):
        output = net(batch[0])
        return Loss(nn.functional.cross_entropy(output, batch[1]), output)

    def measure(self, net, batch):
        return {name: net(batch[0]).sum() for name in ("loss", "top1", "top5")}


def new_run(make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), name="mine", **keys):
    torch.manual_seed(0)
    recipe = Recipe(name="trial", **{"epochs": 3, "batch_size": 4, "optimizer": ("sgd", "thor"), **keys})
    model, cpu = nn.Linear(5, 3), torch.device("cpu")
    return Run(recipe, name, Task(), model, model, make(model), Precision("fp32", None, cpu), Ranks(), RankWeight())


def thor(interval=2):
    return lambda model: THOR(model, lr=0.1, damping=0.1, update_interval=interval)


def points(damping=0.03):
    """Nine steps with refreshes in 1 and 5, of which the second is not taken."""
    at, events = 0.0, {1: (RefreshEvent("", 0, Decision.UPDATE, None, 4.0),),
                       5: (RefreshEvent("", 4, Decision.KEEP, 0.25, math.inf),)}  # fmt: skip
    for step in range(1, 10):
        duration = 0.5 if step in events else 0.01 * step
        at += duration
        loss = math.nan if step == 2 else float(step)
        yield Point(step, loss, 0.1 / step, damping, at, duration, duration / 4, 4, step == 2, step in events,
                    events.get(step, ()))  # fmt: skip


SCORES = {6: Score(6, 0.8, {"loss": 1.25, "top1": 0.5, "top5": 0.75}, {"loss": 1.0, "top1": 0.625, "top5": math.nan}),
          9: Score(9, 1.5, {"loss": math.inf, "top1": 0.75, "top5": 1.0})}  # fmt: skip


def tell(observer, run, first=1, last=9):
    for point in list(points())[first - 1 : last]:
        run.step = point.step
        observer.step(run, point)
        if run.step in SCORES:
            observer.evaluation(run, SCORES[run.step])
        observer.end_of_step(run)


# ------------------------------------------------------------------------------------------------ metrics.jsonl


def test_every_step_refresh_and_evaluation_is_a_line(tmp_path):
    metrics = Metrics(tmp_path / "mine" / "metrics.jsonl")
    tell(metrics, new_run())
    assert metrics.offset() == metrics.path.stat().st_size
    metrics.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in metrics.path.read_text().splitlines()]
    assert Counter(line["kind"] for line in lines) == {"step": 9, "refresh": 2, "eval": 2}
    assert [line["kind"] for line in lines[:3]] == ["step", "refresh", "step"]
    assert lines[0] == {
        "kind": "step", "step": 1, "loss": 1.0, "lr": 0.1, "damping": 0.03, "seconds": 0.5, "duration": 0.5,
        "waited": 0.125, "terms": 4, "skipped": False, "refresh": True,
    }  # fmt: skip
    assert lines[1] == {
        "kind": "refresh", "step": 1, "layer": "", "decision": "update", "trace_change": None, "trace": 4.0,
    }  # fmt: skip
    assert lines[2]["loss"] is None
    assert [line["trace"] for line in lines if line["kind"] == "refresh"] == [4.0, None]
    first, last = [line for line in lines if line["kind"] == "eval"]
    assert first == {
        "kind": "eval", "step": 6, "seconds": 0.8, "loss": 1.25, "top1": 0.5, "top5": 0.75, "averaged_loss": 1.0,
        "averaged_top1": 0.625, "averaged_top5": None, "primary": "top1", "higher_is_better": True,
    }  # fmt: skip
    assert (last["loss"], last["averaged_top1"]) == (None, None)


def test_a_resumed_run_cuts_the_file_to_its_checkpoint(tmp_path):
    """Wherever it was killed, also inside a line, the file is that of a run that was not."""
    whole = Metrics(tmp_path / "whole")
    tell(whole, new_run())
    whole.close()
    content = whole.path.read_bytes()
    for cut in (1, 5, 8):
        metrics = Metrics(tmp_path / f"cut{cut}")
        tell(metrics, new_run(), last=cut)
        offset = metrics.offset()
        tell(metrics, new_run(), first=cut + 1)
        metrics.close()
        with metrics.path.open("rb+") as file:
            file.truncate(offset + 40)
        resumed = Metrics(metrics.path, offset)
        tell(resumed, new_run(), first=cut + 1)
        resumed.close()
        assert metrics.path.read_bytes() == content
    Metrics(whole.path).close()  # a new run begins the file anew
    assert whole.path.read_bytes() == b""


def test_a_file_that_is_not_the_checkpoints_is_refused_as_it_is(tmp_path):
    (tmp_path / "m").write_bytes(b"{}\n")
    with pytest.raises(UserError, match="has 3 bytes, but it had 4 when the checkpoint was saved: put the whole file"):
        Metrics(tmp_path / "m", 4)
    assert (tmp_path / "m").read_bytes() == b"{}\n"


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path / "m")
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"m cannot be written \(No space left on device\): free some disk space"):
        metrics.offset()
    metrics.close()
    (tmp_path / "file").touch()
    for make in (lambda: Metrics(tmp_path / "file" / "m"), lambda: TensorBoard(tmp_path / "file" / "t", new_run())):
        with pytest.raises(UserError, match=r"file(/.)? cannot be written"):
            make()


def test_reading_leaves_out_an_incomplete_line_and_refuses_others(tmp_path):
    (tmp_path / "m").write_text('{"kind": "step"}\n{"kind": "st')
    assert list(read(tmp_path / "m")) == [{"kind": "step"}]
    (tmp_path / "m").write_text('{"kind": "st\n{"kind": "step"}\n')
    for path in (tmp_path / "m", tmp_path / "missing"):
        with pytest.raises(UserError, match=f"{path.name} cannot be read .*: start again with --overwrite or --out"):
            list(read(path))


# -------------------------------------------------------------------------------------------------- TensorBoard


def scalars(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def test_a_point_summarises_the_steps_since_the_latest(tmp_path, monkeypatch):
    monkeypatch.setattr(observers, "FULL_CURVE", 1)  # as if the training were long
    board = TensorBoard(tmp_path, new_run(thor(), log_interval=4))
    tell(board, new_run(thor(), log_interval=4))
    board.close()
    found, told = scalars(tmp_path), list(points())
    bounds = {4: told[:4], 8: told[4:8], 9: told[8:]}  # what is left over at the end too
    expected = {
        "train/loss": {4: (1 + 3 + 4) / 3, 8: 6.5, 9: 9},
        "train/lr": {step: part[-1].lr for step, part in bounds.items()},
        "train/damping": dict.fromkeys(bounds, 0.03),
        "train/images_per_second": {k: 4 * len(part) / sum(p.duration for p in part) for k, part in bounds.items()},
        "train/ordinary_step_seconds": {4: 0.03, 8: 0.07, 9: 0.09},
        "train/refresh_step_seconds": {4: 0.5, 8: 0.5},
        "train/data_wait_seconds": {k: sum(p.duration for p in part) / 4 / len(part) for k, part in bounds.items()},
        "train/skipped": {4: 1},
        "thor/refreshed": {4: 1, 8: 0, 9: 0},
        "thor/kept": {4: 0, 8: 1, 9: 0},
        "thor/failed": dict.fromkeys(bounds, 0),
        "thor/stopped": dict.fromkeys(bounds, 0),
        "trace_change/": {8: 0.25},
        **{f"test/{name}": {6: SCORES[6].metrics[name]} for name in ("top1", "top5", "loss")},
        **{f"averaged/{name}": {6: value} for name, value in SCORES[6].averaged.items()},
    }
    for name in ("top1", "top5", "loss"):
        expected[f"test/{name}"][9] = SCORES[9].metrics[name]
    assert found.keys() == expected.keys()
    for tag, values in expected.items():
        assert found[tag] == pytest.approx(values, nan_ok=True), tag


def test_a_short_training_has_every_step_and_a_long_one_a_small_file(tmp_path):
    for steps, every in ((9, 1), (4_000, 2), (225_180, 100)):  # the last is ResNet-50 on ImageNet
        board = TensorBoard(tmp_path / str(steps), new_run(epochs=1, steps=steps))
        assert board._every == every
        board.close()


def test_scalars_after_the_checkpoint_are_hidden(tmp_path):
    for first, last in ((1, 6), (4, 5)):
        run = new_run()
        run.step = first - 1
        board = TensorBoard(tmp_path, run)
        tell(board, run, first, last)
        board.close()
        [path] = tmp_path.glob("events.out.tfevents.*.*")
        path.rename(tmp_path / f"events.out.tfevents.{first}")  # they are read by name, which has whole seconds
    assert list(scalars(tmp_path)["train/lr"]) == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------ lines and bars


def test_lines():
    console = Console(file=io.StringIO(), width=40)  # a line is a line however narrow the console
    run = new_run(thor(), log_interval=3)
    tell(Lines(run, console), run)
    assert console.file.getvalue().splitlines() == [
        "mine: step 3 of 9, epoch 1, loss 2, lr 0.03333, damping 0.03, 21.82 images/s, step 25.0 ms, refresh step 500 "
        "ms, 25% waiting for data, stopped layers 0 of 1, 1 of 3 steps skipped",
        "mine: step 6 of 9, epoch 2, loss 5, lr 0.01667, damping 0.03, 20 images/s, step 50.0 ms, refresh step 500 ms, "
        "25% waiting for data, stopped layers 0 of 1",
        "mine: step 6 of 9, epoch 2, 0.8 s, accuracy 50.00%, of the averaged weights 62.50%, test loss 1.25",
        "mine: step 9 of 9, epoch 3, loss 8, lr 0.01111, damping 0.03, 50 images/s, step 80.0 ms, refresh step 500 ms, "
        "25% waiting for data, stopped layers 0 of 1",
        "mine: step 9 of 9, epoch 3, 1.5 s, accuracy 75.00%, test loss inf",
    ]


def test_the_place_in_a_training_of_equal_phases_and_no_interval():
    console = Console(file=io.StringIO(), width=400)
    run = new_run(epochs=1, phases=({"steps": 3}, {"steps": 3}, {"steps": 3}), log_interval=None)
    tell(Lines(run, console), run)
    said = [line.split(", ")[:2] for line in console.file.getvalue().splitlines()]
    assert said == [[f"mine: step {step} of 9", f"phase {phase} of 3"] for step, phase in ((6, 2), (9, 3))]


def test_a_bar_shows_the_figures_below_it_while_it_runs():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    run = new_run(thor(), stop_at=0.6)
    bar = Bar(run, console)
    tell(bar, run, last=5)
    bar._live.refresh()
    while_running = console.file.getvalue()
    run.score = SCORES[6]  # which ends the run before its last step
    tell(bar, run, first=6, last=6)
    bar.close()
    at_the_end = console.file.getvalue()[len(while_running) :]
    for words in ("mine", "5/9", "loss 3.25, lr 0.02, damping 0.03", "stopped layers 0 of 1"):
        assert words in while_running
    assert "6/6" in at_the_end
    assert "accuracy 62.50%" in at_the_end
    assert "stopped layers" not in at_the_end.rpartition("6/6")[2]


@pytest.mark.parametrize(("optimizer", "biases", "rest"), [(THOR, 30, "plain momentum"), (ThorMuon, 0, "AdamW")])
def test_what_is_said_first(optimizer, biases, rest):
    run = new_run(name="sgd")
    model = nn.Sequential(nn.Linear(9, 10), nn.LayerNorm(10), nn.Linear(10, 20), nn.LayerNorm(20), nn.BatchNorm1d(20))
    run.model, run.optimizer = model, optimizer(model)
    size, covered = 9 * 10 + 10 + 10 * 20 + 20 + 2 * 10 + 4 * 20, 9 * 10 + 10 * 20 + biases
    others = f"BatchNorm1d (1), LayerNorm (2){'' if biases else ', biases of Linear (2)'}"
    assert facts(run) == [
        f"trial: small-cnn ({size:,} parameters), 9 steps with each of sgd, thor, on cpu, threads=1",
        f"sgd: preconditions 2 layers with {covered / size:.2%} of the parameters; {rest} for the rest: {others}",
    ]
    assert facts(new_run()) == []  # of the second optimizer, if it has no curvature


# ------------------------------------------------------------------------------------------------------ profiles


def profile(run, folder, *others):
    console = Console(file=io.StringIO(), width=100)
    train(run, [*others, Profiler(folder, console)])
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("make", "steps", "first", "last", "refreshes"),
    [
        (thor(9), 40, 10, 15, 1),  # refreshes in 1, 10, 19, ...: the next one, and five ordinary steps
        (thor(4), 40, 9, 14, 2),  # 5 is over when the first steps are
        (thor(1), 40, 7, 12, 6),
        (thor(100), 40, 7, 12, 0),  # no refresh will come any more
        (None, 40, 7, 12, 0),
        (None, 9, 4, 9, 0),  # there is no time for first steps
        (None, 4, 3, 4, 0),
    ],
)
def test_which_steps_are_profiled(tmp_path, monkeypatch, make, steps, first, last, refreshes):
    monkeypatch.setattr(profiling, "ROWS", 1000)
    run, plain = (new_run(*([make] if make else []), epochs=1, steps=steps, eval_interval=1) for _ in range(2))
    said = profile(run, tmp_path / "profile")
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == f"steps-{first:08d}-{last:08d}.json"
    assert f"Steps {first} to {last}, {refreshes} of {last - first + 1} with a refresh" in said
    assert str(path) in said.replace("\n", "")
    names = [str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]]
    count = last - first + 1
    assert sum(name.startswith("Optimizer.step#") for name in names) == count
    # one of the training, and three of an evaluation, of which the last is not in a complete profile
    assert names.count("aten::linear") == 4 * count - 3 * (count == profiling.ACTIVE)
    [row] = [line.split() for line in said.splitlines() if "aten::linear " in line]
    assert row[3] == str(count)  # in the table there are those of the training alone
    train(plain)
    assert torch.equal(plain.model.weight, run.model.weight)


def test_a_profile_that_cannot_be_made_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    assert "nothing was profiled: the training had only 1 more steps" in profile(
        new_run(epochs=1, steps=1), tmp_path / "profile"
    )

    class Stop(Observer):
        def end_of_step(self, run):
            if run.step == 9:
                raise SystemExit

    with pytest.raises(SystemExit):
        profile(new_run(epochs=1, steps=40), tmp_path / "profile", Stop())
    assert not torch.autograd._profiler_enabled()
    assert not (tmp_path / "profile").exists()
    monkeypatch.setattr(profiling.profile, "export_chrome_trace", lambda me, path: None)  # it does not raise
    with pytest.raises(UserError, match=r"steps-00000007-00000012.json cannot be written: free some disk space"):
        profile(new_run(epochs=1, steps=40), tmp_path / "other")
