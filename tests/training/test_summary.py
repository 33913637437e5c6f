"""The final table, the comparison, `summary.json` and the curves, from metrics files by hand."""

import io
import json
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from torch_thor.training import summary
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.summary import Result, draw_curves, report
from torch_thor.training.tasks.images import ImageClassification
from torch_thor.training.tasks.task import Metric, primary

TASK = SimpleNamespace(metrics=ImageClassification.metrics, unit="images")
DURATIONS, LOSSES = (4.0, 1.0, 2.0, 1.0), (3.0, 2.0, None, 1.0)
DECISIONS = {1: {"a": "update", "b": "failed"}, 4: {"a": "keep", "b": "stop"}}


def write(folder, name, finals=(0.8, 0.7), averages=(None, None)):
    """Four steps, the first with a refresh and the third skipped; evaluations after 2 and 4."""
    lines, at = [], 0.0
    for step, (duration, loss) in enumerate(zip(DURATIONS, LOSSES, strict=True), 1):
        at += duration
        lines.append(
            {"kind": "step", "step": step, "loss": loss, "duration": duration, "seconds": at,
             "lr": 0.1 / step, "waited": duration / 4, "terms": 8, "refresh": step == 1,
             "skipped": step == 3}
        )  # fmt: skip
        lines += [
            {"kind": "refresh", "step": step, "layer": layer, "decision": decision}
            for layer, decision in DECISIONS.get(step, {}).items()
        ]
        if step % 2 == 0:
            top1, averaged = finals[step // 2 - 1], averages[step // 2 - 1]
            lines.append(
                {"kind": "eval", "step": step, "seconds": at, "loss": 1.0, "top1": top1,
                 "averaged_top1": averaged, "primary": "top1", "higher_is_better": True}
            )  # fmt: skip
    folder.metrics(name).parent.mkdir(parents=True, exist_ok=True)
    write_lines(folder.metrics(name), lines)
    return Result(name, folder.metrics(name), primary(TASK.metrics))


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reported(folder, optimizer=("sgd",), **keys):
    """(rows of the table, other lines, summary.json)."""
    console = Console(file=io.StringIO(), width=120)
    report(folder, Recipe(optimizer=optimizer, **keys), TASK, console)
    lines = [line for line in console.file.getvalue().splitlines() if line.strip() != "Result"]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    others = [line for line in lines if line and line[0] not in "│┏┃┡├└"]
    return {name: values for name, *values in cells}, others, json.loads(folder.summary.read_text())


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    write(folder, "sgd")
    return folder


def test_one_optimizer(folder):
    table, lines, [told] = reported(folder, targets=(0.9, 0.2, 0.7597))
    assert table == {
        "highest learning rate": ["0.1"],
        "steps to accuracy 20%": ["2 (5.0 s)"],
        "steps to accuracy 75.97%": ["2 (5.0 s)"],
        "steps to accuracy 90%": ["not reached"],
        "final accuracy": ["70.00%"],
        "steps in total": ["4 (8.0 s)"],
        "median step / refresh step": ["1000 ms / 4000 ms"],
    }
    assert lines == [f"Curves, metrics, recipe and checkpoints are in {folder.path}"]
    assert told == {
        "optimizer": "sgd", "steps": 4, "seconds": 8.0, "loss": 1.0, "top1": 0.7,
        "averaged_top1": None, "best": {"step": 2, "top1": 0.8},
        "stop_at": None, "ended_at_target": False,
        "targets": {"0.2": {"steps": 2, "seconds": 5.0}, "0.7597": {"steps": 2, "seconds": 5.0},
                    "0.9": None},
        "images_per_second": 4.0, "waiting_for_data": 0.25, "skipped_steps": 1,
        "ordinary_step_seconds": 1.0, "refresh_step_seconds": 4.0,
        "decisions": {"a": {"update": 1, "keep": 1}, "b": {"failed": 1, "stop": 1}},
    }  # fmt: skip
    assert folder.curves.read_bytes().startswith(b"\x89PNG")


def test_averaged_weights_decide_where_there_are_any(folder):
    write(folder, "sgd", averages=(0.75, 0.85))
    table, _, [told] = reported(folder, ema_decay=0.9, stop_at=0.85)
    assert table["final accuracy of averaged weights"] == ["85.00%"]
    assert table["steps to accuracy 85%"] == ["4 (8.0 s)"]
    assert (told["top1"], told["averaged_top1"]) == (0.7, 0.85)
    assert told["best"] == {"step": 4, "top1": 0.85}
    assert told["ended_at_target"]


@pytest.mark.parametrize(
    ("names", "row"),
    [
        (
            ("thor-muon", "adamw", "muon"),
            {"steps to adamw's end, 75.00%": ["2 (5.0 s)", "4 (8.0 s)", "not reached"]},
        ),
        (("muon", "thor-muon"), {"steps to thor-muon's end, 90.00%": ["not reached", "4 (8.0 s)"]}),
        (("muon",), {}),  # there is nothing to compare
    ],
)
def test_a_row_compares_with_adamw_or_the_last(folder, names, row):
    finals = {"thor-muon": (0.75, 0.9), "adamw": (0.7, 0.75), "muon": (0.5, 0.6)}
    results = [write(folder, name, finals[name]) for name in names]
    columns = summary.table(results, Recipe()).columns
    first, *rest = ([str(cell) for cell in column.cells] for column in columns)
    found = dict(zip(first, map(list, zip(*rest, strict=True)), strict=True))
    assert {key: cells for key, cells in found.items() if "'s end" in key} == row


def test_a_loss_is_reached_from_above(tmp_path):
    losses = (3.0, None, 2.0, 2.5)
    lines = [{"kind": "eval", "step": n, "loss": loss} for n, loss in enumerate(losses)]
    write_lines(tmp_path / "m", lines)
    metric = Metric("loss", "loss", "held-out loss", higher_is_better=False, primary=True)
    result = Result("sgd", tmp_path / "m", metric)
    reached = [result.reaching(goal) for goal in (3.0, 2.5, 2.0, 1.9)]
    assert [line and line["step"] for line in reached] == [0, 2, 2, None]
    assert result.best()["step"] == 2


def test_curves_pass_over_a_loss_that_is_not_finite_and_show_averaged_weights(folder, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    results = [write(folder, "sgd"), write(folder, "thor", averages=(0.75, 0.85))]
    draw_curves(results, folder.curves, "a title")
    [figure] = drawn
    panels = [axes.get_lines() for axes in figure.axes]  # losses, then metrics, by step and by time
    for panel, xs in zip(panels, ([1, 2, 4], [4, 5, 8], [2, 4], [5, 8]), strict=True):
        assert [line.get_xdata().tolist() for line in panel] == [xs, xs]
        ys = [[3.0, 2.9, 2.71]] * 2 if len(xs) == 3 else [[0.8, 0.7], [0.75, 0.85]]
        for line, values in zip(panel, ys, strict=True):
            assert line.get_ydata().tolist() == pytest.approx(values)
