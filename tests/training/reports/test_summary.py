"""The final table and `summary.json`, of hand-made records."""

import io
import json
import math

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from replaying import accuracy_point
from torch_thor.training import History, StepPoint
from torch_thor.training.reports import Summary, as_json, draw_curves, summary_table
from torch_thor.training.tasks import ImageClassification


def record(**changes):
    steps = [
        StepPoint(1, 3.0, 0.1, 4.0, 4.0, True, 8, 1.0),
        StepPoint(2, 2.0, 0.1, 5.0, 1.0, False, 8, 0.5),
        StepPoint(3, math.nan, 0.1, 7.0, 2.0, False, 8, 0.5, skipped=changes.get("skipped", False)),
        StepPoint(4, 1.0, 0.1, 8.0, 1.0, False, 8, 0.0),
    ]
    averages = changes.get("averages", [(None, None)] * 2)
    evaluations = [
        accuracy_point(step, seconds, 1.0, top1, 0.9, 0.5 if averaged[0] else None, *averaged)
        for step, seconds, top1, averaged in ((2, 5.0, 0.8, averages[0]), (4, 8.0, 0.7, averages[1]))
    ]
    return History(steps, evaluations)


def summary(name, told, stop_at=None):
    return Summary(name, told, (), ImageClassification.METRICS, "images", stop_at)


def rows(summaries, targets):
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(summaries, targets))
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines() if "│" in line]
    return {name: values for name, *values in cells}


def test_one_run():
    table = rows([summary("sgd", record())], [0.7597, 0.9])
    assert table == {
        "steps (seconds) to 75.97%": ["2 (5.0 s)"],
        "steps (seconds) to 90.0%": ["not reached"],
        "final accuracy, top-1": ["70.00%"],
        "final accuracy, top-5": ["90.00%"],
        "best accuracy (its step)": ["80.00% (2)"],
        "steps (seconds) in all": ["4 (8.0 s)"],
        "images a second, ordinary steps": ["8"],
        "waiting for data": ["25.0% of the time"],
        "an ordinary step, median": ["1000.0 ms"],
        "a refresh step, median": ["4000.0 ms"],
        "refresh steps": ["1"],
        "layers refreshed, of those due": ["none"],
        "layers stopped": ["none"],
    }


def test_rows_for_what_only_some_have():
    averaged = record(averages=[(0.5, 0.75), (0.85, 0.95)], skipped=True)
    summaries = [summary("ema", averaged, 0.85), summary("sgd", record(), 0.85)]
    table = rows(summaries, [])
    assert table["averaged weights, accuracy, top-1"] == ["85.00%", "none"]
    assert table["averaged weights, accuracy, top-5"] == ["95.00%", "none"]
    assert table["best accuracy (its step)"] == ["85.00% (4)", "80.00% (2)"]
    assert table["ended at 85.0%"] == ["yes", "no"]
    assert table["steps skipped (float16 overflow)"] == ["1", "0"]


def test_json():
    told = as_json(summary("ema", record(averages=[(0.5, 0.75), (0.85, 0.95)], skipped=True), 0.85), [0.85])
    assert json.loads(json.dumps(told, allow_nan=False)) == {
        "optimizer": "ema", "steps": 4, "seconds": 8.0, "loss": 1.0, "top1": 0.7, "top5": 0.9,
        "averaged_loss": 0.5, "averaged_top1": 0.85, "averaged_top5": 0.95, "best": {"step": 4, "accuracy": 0.85},
        "stop_at": 0.85, "ended_at_target": True, "targets": {"0.85": {"steps": 4, "seconds": 8.0}},
        "images_per_second": 8.0, "waiting_for_data": 0.25, "skipped_steps": 1,
        "ordinary_step_seconds": 1.0, "refresh_step_seconds": 4.0, "refreshed": {},
    }  # fmt: skip
    plain = as_json(summary("sgd", record()), [])
    assert (plain["averaged_top1"], plain["stop_at"], plain["ended_at_target"]) == (None, None, False)


def test_curves_pass_over_a_loss_that_is_not_finite_and_show_averages(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.touch()))
    draw_curves([summary("ema", record(averages=[(0.5, 0.75), (0.85, 0.95)]))], tmp_path / "curves.png")
    loss, _, accuracy, seconds = drawn[0].axes
    assert loss.get_lines()[0].get_ydata().tolist() == pytest.approx([3.0, 2.9, 2.9, 2.71])
    assert [line.get_ydata().tolist() for line in accuracy.get_lines()] == [[0.8, 0.7], [0.5, 0.85]]
    assert [line.get_label() for line in seconds.get_lines()] == ["ema", "ema, averaged weights"]
    assert seconds.get_lines()[1].get_xdata().tolist() == [5.0, 8.0]
