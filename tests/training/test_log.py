"""A running training writes the metrics file and TensorBoard's, and prints lines and a bar."""

import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from torch_thor import THOR
from torch_thor.curvature import Decision, RefreshEvent
from torch_thor.errors import UserError
from torch_thor.training.log import Metrics, Progress
from torch_thor.training.loop import Point, Run, Score
from torch_thor.training.parallel import Ranks, RankWeight
from torch_thor.training.precision import Precision
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.images import ImageClassification

TASK = SimpleNamespace(unit="images", metrics=ImageClassification.metrics, steps_per_epoch=3)


def new_run(optimizer=THOR, name="mine", **keys):
    """Nine steps of a linear layer."""
    keys = {"epochs": 3, "batch_size": 4, "optimizer": ("sgd", "thor"), **keys}
    model, cpu = nn.Linear(5, 3), torch.device("cpu")
    return Run(
        Recipe(name="trial", **keys), name, TASK, model, model, optimizer(model),
        Precision("fp32", None, cpu), Ranks(), RankWeight(),
    )  # fmt: skip


def points():
    """Nine steps with refreshes in 1 and 5, of which the second is not taken; 2 is skipped."""
    at = 0.0
    events = {
        1: (RefreshEvent("", 0, Decision.UPDATE, None, 4.0),),
        5: (RefreshEvent("", 4, Decision.KEEP, 0.25, math.inf),),
    }
    for step in range(1, 10):
        duration = 0.5 if step in events else 0.01 * step
        at += duration
        yield Point(
            step, float(step), 0.1 / step, 0.03, at, duration, duration / 4, 4, step == 2,
            step in events, events.get(step, ()),
        )  # fmt: skip


SCORES = {
    6: Score(6, 0.8, {"loss": 1.25, "top1": 0.5, "top5": 0.75},
             {"loss": 1.0, "top1": 0.625, "top5": math.nan}),
    9: Score(9, 1.5, {"loss": math.inf, "top1": 0.75, "top5": 1.0}),
}  # fmt: skip


def tell(observer, run, first=1, last=9):
    for point in list(points())[first - 1 : last]:
        run.step = point.step
        observer.step(run, point)
        if run.step in SCORES:
            observer.evaluation(run, SCORES[run.step])
        observer.end_of_step(run)


def test_every_step_refresh_and_evaluation_is_a_line(tmp_path):
    path = tmp_path / "mine" / "metrics.jsonl"
    metrics = Metrics(path)
    tell(metrics, new_run())
    assert metrics.offset() == path.stat().st_size
    metrics.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    kinds = ["step", "refresh", *["step"] * 4, "refresh", "step", "eval", *["step"] * 3, "eval"]
    assert [line["kind"] for line in lines] == kinds
    assert [*lines[:2], lines[8]] == [
        {"kind": "step", "step": 1, "loss": 1.0, "lr": 0.1, "damping": 0.03, "seconds": 0.5,
         "duration": 0.5, "waited": 0.125, "terms": 4, "skipped": False, "refresh": True},
        {"kind": "refresh", "step": 1, "layer": "", "decision": "update", "trace_change": None,
         "trace": 4.0},
        {"kind": "eval", "step": 6, "seconds": 0.8, "loss": 1.25, "top1": 0.5, "top5": 0.75,
         "averaged_loss": 1.0, "averaged_top1": 0.625, "averaged_top5": None, "primary": "top1",
         "higher_is_better": True},
    ]  # fmt: skip
    assert (lines[6]["trace"], lines[-1]["loss"], lines[-1]["averaged_top1"]) == (None, None, None)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_resumed_run_cuts_the_file_to_its_checkpoint(tmp_path, cut):
    path, metrics = tmp_path / "m", Metrics(tmp_path / "m")
    tell(metrics, new_run(), last=cut)
    offset = metrics.offset()
    tell(metrics, new_run(), first=cut + 1)
    metrics.close()
    content = path.read_bytes()
    path.write_bytes(content[: offset + 40])
    metrics = Metrics(path, offset)
    assert metrics.offset() == offset
    tell(metrics, new_run(), first=cut + 1)
    metrics.close()
    assert path.read_bytes() == content
    with pytest.raises(UserError, match=r"m is shorter than .* put the whole file back"):
        Metrics(path, len(content) + 1)
    Metrics(path).close()  # a new run begins the file anew
    assert not path.read_bytes()


def shown(folder, run, first=1, last=9, **options):
    console = Console(file=io.StringIO(), color_system=None, **options)
    progress = Progress(run, folder, console)
    tell(progress, run, first, last)
    progress.close()
    return console.file.getvalue()


def test_lines_and_a_bar_in_a_terminal(tmp_path):
    # no line is wrapped in a narrow console
    assert shown(tmp_path, new_run(log_interval=3), width=40).splitlines() == [
        "mine: step 3 of 9, epoch 1, loss 2, lr 0.03333, damping 0.03, images per second 21.82, "
        "step ms 25, refresh step ms 500, waiting for data 0.25, skipped steps 1, stopped layers 0",
        "mine: step 6 of 9, epoch 2, loss 5, lr 0.01667, damping 0.03, images per second 20, "
        "step ms 50, refresh step ms 500, waiting for data 0.25, stopped layers 0",
        "mine: step 6 of 9, epoch 2, 0.8 s, averaged weights: held-out loss 1, accuracy 62.50%",
        "mine: step 9 of 9, epoch 3, loss 8, lr 0.01111, damping 0.03, images per second 50, "
        "step ms 80, waiting for data 0.25, stopped layers 0",
        "mine: step 9 of 9, epoch 3, 1.5 s, held-out loss inf, accuracy 75.00%",
    ]
    said = shown(tmp_path, new_run(log_interval=3), last=5, width=120, force_terminal=True)
    assert "5/9" in said[said.index("mine: step 3 of 9, epoch 1, loss 2") :]


def scalars(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def test_tensorboard_has_every_loss_and_the_numbers_of_the_lines(tmp_path):
    shown(tmp_path, new_run(log_interval=4))
    expected = {
        "train/loss": {step: step for step in range(1, 10)},
        "train/lr": {4: 0.025, 8: 0.0125},
        "train/images_per_second": {4: 16 / 0.59, 8: 16 / 0.71},
        "train/refresh_step_ms": {4: 500, 8: 500},
        "train/skipped_steps": {4: 1},
        "thor/keep": {5: 1},
        "trace_change/": {5: 0.25},
    }
    for name, value in SCORES[6].averaged.items():
        expected[f"averaged/{name}"] = {6: value}
        expected[f"test/{name}"] = {step: SCORES[step].metrics[name] for step in SCORES}
    found = scalars(tmp_path)
    for tag, values in expected.items():
        assert found[tag] == pytest.approx(values, nan_ok=True), tag
