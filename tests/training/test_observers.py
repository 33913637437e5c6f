"""What a training writes and says while it runs: the metrics file, TensorBoard's scalars, lines,
bars and profiles.
"""

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
from torch_thor.curvature import Decision, RefreshEvent
from torch_thor.errors import UserError
from torch_thor.training import observers, profiling
from torch_thor.training.loop import Observer, Point, Run, Score, train
from torch_thor.training.observers import Metrics, TensorBoard, facts
from torch_thor.training.parallel import Ranks, RankWeight
from torch_thor.training.precision import Precision
from torch_thor.training.profiling import Profiler
from torch_thor.training.progress import Bar, Lines
from torch_thor.training.recipe_model import Recipe
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
    recipe = Recipe(
        name="trial", **{"epochs": 3, "batch_size": 4, "optimizer": ("sgd", "thor"), **keys}
    )
    model, cpu = nn.Linear(5, 3), torch.device("cpu")
    return Run(
        recipe,
        name,
        Task(),
        model,
        model,
        make(model),
        Precision("fp32", None, cpu),
        Ranks(),
        RankWeight(),
    )


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
        yield Point(step, loss, 0.1 / step, damping, at, duration, duration / 4, 4, step == 2,
        step in events,
                    events.get(step, ()))  # fmt: skip


SCORES = {6: Score(6, 0.8, {"loss": 1.25, "top1": 0.5, "top5": 0.75},
{"loss": 1.0, "top1": 0.625, "top5": math.nan}),
          9: Score(9, 1.5, {"loss": math.inf, "top1": 0.75, "top5": 1.0})}  # fmt: skip


def tell(observer, run, first=1, last=9):
    for point in list(points())[first - 1 : last]:
        run.step = point.step
        observer.step(run, point)
        if run.step in SCORES:
            observer.evaluation(run, SCORES[run.step])
        observer.end_of_step(run)


def test_every_step_refresh_and_evaluation_is_a_line(tmp_path):
    metrics = Metrics(tmp_path / "mine" / "metrics.jsonl")
    tell(metrics, new_run())
    assert metrics.offset() == metrics.path.stat().st_size
    metrics.close()
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in metrics.path.read_text().splitlines()
    ]
    assert Counter(line["kind"] for line in lines) == {"step": 9, "refresh": 2, "eval": 2}
    assert [line["trace"] for line in lines if line["kind"] == "refresh"] == [4.0, None]
    first, last = [line for line in lines if line["kind"] == "eval"]
    assert [*lines[:2], first] == [
        {"kind": "step", "step": 1, "loss": 1.0, "lr": 0.1, "damping": 0.03, "seconds": 0.5,
        "duration": 0.5,
         "waited": 0.125, "terms": 4, "skipped": False, "refresh": True},
        {"kind": "refresh", "step": 1, "layer": "", "decision": "update", "trace_change": None,
        "trace": 4.0},
        {"kind": "eval", "step": 6, "seconds": 0.8, "loss": 1.25, "top1": 0.5, "top5": 0.75,
        "averaged_loss": 1.0,
         "averaged_top1": 0.625, "averaged_top5": None, "primary": "top1",
         "higher_is_better": True},
    ]  # fmt: skip
    assert (lines[2]["loss"], last["loss"], last["averaged_top1"]) == (None, None, None)


def test_a_file_whose_line_ends_were_converted_is_left_as_it_is(tmp_path):
    metrics = Metrics(tmp_path / "m")
    tell(metrics, new_run())
    offset = metrics.offset()
    metrics.close()
    converted = metrics.path.read_bytes().replace(b"\n", b"\r\n")
    metrics.path.write_bytes(converted)
    message = rf"m was changed since .* no line ends at byte {offset}, .*: put the file back, or"
    with pytest.raises(UserError, match=message):
        Metrics(metrics.path, offset)
    assert metrics.path.read_bytes() == converted


def test_a_resumed_run_cuts_the_file_to_its_checkpoint(tmp_path):
    """Wherever it was killed, also inside a line, the file is that of a run that was not."""
    metrics = Metrics(tmp_path / "m")
    tell(metrics, new_run())
    metrics.close()
    content = metrics.path.read_bytes()
    for cut in (1, 5, 8):
        metrics = Metrics(tmp_path / "m")  # a new run begins the file anew
        tell(metrics, new_run(), last=cut)
        offset = metrics.offset()
        tell(metrics, new_run(), first=cut + 1)
        metrics.close()
        metrics.path.write_bytes(metrics.path.read_bytes()[: offset + 40])
        metrics = Metrics(metrics.path, offset)
        tell(metrics, new_run(), first=cut + 1)
        metrics.close()
        assert metrics.path.read_bytes() == content
    with pytest.raises(
        UserError,
        match=rf"has {len(content)} bytes, but it had \d+ when .* put the whole file back",
    ):
        Metrics(tmp_path / "m", len(content) + 1)
    assert metrics.path.read_bytes() == content


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path / "m")
    monkeypatch.setattr(
        os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(
        UserError, match=r"m cannot be written \(No space left on device\): free some disk space"
    ):
        metrics.offset()
    (tmp_path / "file").touch()
    for make in (
        lambda: Metrics(tmp_path / "file" / "m"),
        lambda: TensorBoard(tmp_path / "file" / "t", new_run()),
    ):
        with pytest.raises(UserError, match=r"file(/.)? cannot be written"):
            make()


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
        "train/images_per_second": {
            k: 4 * len(part) / sum(p.duration for p in part) for k, part in bounds.items()
        },
        "train/step_ms": {4: 30, 8: 70, 9: 90},
        "train/refresh_step_ms": {4: 500, 8: 500},
        "train/waiting_for_data": dict.fromkeys(bounds, 0.25),
        "train/stopped_layers": dict.fromkeys(bounds, 0),
        "train/skipped_steps": {4: 1},
        "thor/update": {4: 1},
        "thor/keep": {8: 1},
        "trace_change/": {8: 0.25},
        **{
            f"test/{name}": {n: SCORES[n].metrics[name] for n in SCORES}
            for name in ("top1", "top5", "loss")
        },
        **{f"averaged/{name}": {6: value} for name, value in SCORES[6].averaged.items()},
    }
    assert found.keys() == expected.keys()
    for tag, values in expected.items():
        assert found[tag] == pytest.approx(values, nan_ok=True), tag
    for steps, every in ((9, 1), (4_000, 2), (225_180, 100)):  # the last is ResNet-50 on ImageNet
        monkeypatch.setattr(observers, "FULL_CURVE", 2000)
        assert TensorBoard(tmp_path / str(steps), new_run(epochs=1, steps=steps))._every == every


def test_scalars_after_the_checkpoint_are_hidden(tmp_path):
    for first, last in ((1, 6), (4, 5)):
        run = new_run(epochs=1, steps=last)
        run.step = first - 1
        board = TensorBoard(tmp_path, run)
        tell(board, run, first, last)
        board.close()
        [path] = tmp_path.glob("events.out.tfevents.*.*")
        # they are read by name, which has whole seconds
        path.rename(tmp_path / f"events.out.tfevents.{first}")
    assert list(scalars(tmp_path)["train/lr"]) == [1, 2, 3, 4, 5]


def printed(run, width=400):
    console = Console(file=io.StringIO(), width=width)
    tell(Lines(run, console), run)
    return console.file.getvalue().splitlines()


def test_lines():
    rest = "refresh step ms 500, waiting for data 0.25, stopped layers 0"
    # a line is a line however narrow the console
    assert printed(new_run(thor(), log_interval=3), width=40) == [
        "mine: step 3 of 9, epoch 1, loss 2, lr 0.03333, damping 0.03, images per second 21.82, "
        f"step ms 25, {rest}, skipped steps 1",
        "mine: step 6 of 9, epoch 2, loss 5, lr 0.01667, damping 0.03, images per second 20, step "
        f"ms 50, {rest}",
        "mine: step 6 of 9, epoch 2, 0.8 s, accuracy 50.00%, of the averaged weights 62.50%, "
        "held-out loss 1.25",
        "mine: step 9 of 9, epoch 3, loss 8, lr 0.01111, damping 0.03, images per second 50, step "
        "ms 80, waiting for data 0.25, stopped layers 0",
        "mine: step 9 of 9, epoch 3, 1.5 s, accuracy 75.00%, held-out loss inf",
    ]
    said = printed(
        new_run(epochs=1, phases=({"steps": 3}, {"steps": 3}, {"steps": 3}), log_interval=None)
    )
    assert [line.split(", ")[:2] for line in said] == [
        [f"mine: step {3 * n} of 9", f"phase {n} of 3"] for n in (2, 3)
    ]


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
    for words in ("mine", "5/9", "loss 3.25, lr 0.02, damping 0.03"):
        assert words in while_running
    assert "6/6" in at_the_end
    assert "accuracy 62.50%" in at_the_end
    assert "lr 0.0" not in at_the_end.rpartition("6/6")[2]


@pytest.mark.parametrize(
    ("optimizer", "biases", "rest"), [(THOR, 30, "plain momentum"), (ThorMuon, 0, "AdamW")]
)
def test_what_is_said_first(optimizer, biases, rest):
    run = new_run(name="sgd")
    model = nn.Sequential(
        nn.Linear(9, 10), nn.LayerNorm(10), nn.Linear(10, 20), nn.LayerNorm(20), nn.BatchNorm1d(20)
    )
    run.model, run.optimizer = model, optimizer(model)
    size, covered = 9 * 10 + 10 + 10 * 20 + 20 + 2 * 10 + 4 * 20, 9 * 10 + 10 * 20 + biases
    others = f"BatchNorm1d (1), LayerNorm (2){'' if biases else ', biases of Linear (2)'}"
    assert facts(run) == [
        f"trial: small-cnn ({size:,} parameters), 9 steps with each of sgd, thor, on cpu, "
        "threads=1",
        f"sgd: preconditions 2 layers with {covered / size:.2%} of the parameters; {rest} for the "
        f"rest: {others}",
    ]
    assert facts(new_run()) == []  # of the second optimizer, if it has no curvature


def profile(run, folder, *others):
    console = Console(file=io.StringIO(), width=100)
    train(run, [*others, Profiler(folder, console)])
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("make", "steps", "first", "last", "refreshes"),
    [
        # refreshes in 1, 10, 19, ...: the next one, and five ordinary steps
        (thor(9), 40, 10, 15, 1),
        (thor(4), 40, 9, 14, 2),  # 5 is over when the first steps are
        (thor(1), 40, 7, 12, 6),
        (thor(100), 20, 15, 20, 0),  # no refresh will come any more
        (None, 40, 7, 12, 0),
        (None, 4, 3, 4, 0),  # there is no time for first steps
    ],
)
def test_which_steps_are_profiled(tmp_path, monkeypatch, make, steps, first, last, refreshes):
    monkeypatch.setattr(profiling, "ROWS", 1000)
    run, plain = (
        new_run(*([make] if make else []), epochs=1, steps=steps, eval_interval=1) for _ in range(2)
    )
    said, count = profile(run, tmp_path / "profile"), last - first + 1
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == f"steps-{first:08d}-{last:08d}.json"
    assert f"Steps {first} to {last}, {refreshes} of {count} with a refresh" in said
    assert str(path) in said.replace("\n", "")
    names = [str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == count
    # one of the training, and three of an evaluation
    assert names.count("aten::linear") == 4 * count
    [row] = [line.split() for line in said.splitlines() if "aten::linear " in line]
    assert row[3] == str(count)  # in the table there are those of the training alone
    train(plain)
    assert torch.equal(plain.model.weight, run.model.weight)


class Stop(Observer):
    def end_of_step(self, run):
        if run.step == 9:
            raise SystemExit


def test_a_profile_that_cannot_be_made_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    said = "nothing was profiled: the training had only 1 more steps"
    assert said in profile(new_run(epochs=1, steps=1), tmp_path / "profile")
    with pytest.raises(SystemExit):
        profile(new_run(epochs=1, steps=40), tmp_path / "profile", Stop())
    assert not torch.autograd._profiler_enabled()
    assert not (tmp_path / "profile").exists()
    # it does not raise
    monkeypatch.setattr(profiling.profile, "export_chrome_trace", lambda me, path: None)
    with pytest.raises(
        UserError, match=r"steps-00000007-00000012.json cannot be written: check its disk"
    ):
        profile(new_run(epochs=1, steps=40), tmp_path / "other")
