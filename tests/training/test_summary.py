"""The final table, the comparison, `summary.json` and the curves, of hand-made metrics files."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from torch_thor.training import summary
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.summary import Result, compared, draw_curves, report
from torch_thor.training.tasks.images import ImageClassification
from torch_thor.training.tasks.task import Metric, primary

TASK = SimpleNamespace(metrics=ImageClassification.metrics, unit="images")
DURATIONS, LOSSES = (4.0, 1.0, 2.0, 1.0), (3.0, 2.0, None, 1.0)
DECISIONS = {
    1: {"a": "update", "b": "failed"},
    2: {},
    3: {},
    4: {"a": "keep", "b": "stop"},
}


def write(folder, name, finals=(0.8, 0.7), averages=(None, None)):
    """Four steps, the first with a refresh and the third skipped; evaluations after 2 and 4."""
    lines, at = [], 0.0
    for step, (duration, loss) in enumerate(zip(DURATIONS, LOSSES, strict=True), 1):
        at += duration
        lines.append(
            {"kind": "step", "step": step, "loss": loss, "duration": duration, "seconds": at,
             "waited": duration / 4, "terms": 8, "refresh": step == 1, "skipped": step == 3}
        )  # fmt: skip
        lines += [
            {"kind": "refresh", "step": step, "layer": layer, "decision": decision}
            for layer, decision in DECISIONS[step].items()
        ]
        if step % 2 == 0:
            top1, averaged = finals[step // 2 - 1], averages[step // 2 - 1]
            lines.append(
                {"kind": "eval", "step": step, "seconds": at, "loss": 1.0, "top1": top1,
                 "averaged_top1": averaged, "primary": "top1", "higher_is_better": True}
            )  # fmt: skip
    path = folder.metrics(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reported(folder, optimizer=("sgd",), **keys):
    """(rows of the table, other lines, summary.json)."""
    console = Console(file=io.StringIO(), width=120)
    report(folder, Recipe(optimizer=optimizer, **keys), TASK, console)
    lines = console.file.getvalue().splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    others = [
        line for line in lines if line and line[0] not in "│┏┃┡├└" and line.strip() != "Result"
    ]
    return {name: values for name, *values in cells}, others, json.loads(folder.summary.read_text())


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    write(folder, "sgd")
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures, which are not saved."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    return drawn


def test_one_optimizer(folder):
    table, lines, [told] = reported(folder, targets=(0.9, 0.2, 0.7597))
    assert table == {
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


def test_a_value_that_is_not_finite_is_null_as_json_has_it(folder):
    write(folder, "sgd", (None, None))
    _, _, [told] = reported(folder)
    assert told["best"] == {"step": 2, "top1": None}
    assert "NaN" not in folder.summary.read_text()


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (
            ("thor-muon", "adamw", "muon"),
            "Steps to what adamw ends with (accuracy 75.00%): "
            "thor-muon 2 (5.0 s), adamw 4 (8.0 s), muon not reached",
        ),
        (
            ("muon", "thor-muon"),
            "Steps to what thor-muon ends with (accuracy 90.00%): "
            "muon not reached, thor-muon 4 (8.0 s)",
        ),
        (("muon",), ""),  # there is nothing to compare
        (("muon", "nan"), ""),
    ],
)
def test_the_sentence_compares_with_adamw_or_the_last(folder, optimizer, sentence):
    write(folder, "thor-muon", (0.75, 0.9))
    write(folder, "adamw", (0.7, 0.75))
    write(folder, "muon", (0.5, 0.6))
    write(folder, "nan", (0.5, None))
    metric = primary(TASK.metrics)
    assert compared([Result(name, folder.metrics(name), metric) for name in optimizer]) == sentence


def test_a_loss_is_reached_from_above(tmp_path):
    path = tmp_path / "m"
    lines = [
        {"kind": "eval", "step": n, "seconds": n / 10, "loss": loss}
        for n, loss in enumerate((3.0, None, 2.0, 2.5))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metric = Metric("loss", "loss", "held-out loss", higher_is_better=False, primary=True)
    result = Result("one", path, metric)
    reached = [result.reaching(goal) for goal in (3.0, 2.5, 2.0, 1.9)]
    assert [line and line["step"] for line in reached] == [0, 2, 2, None]
    assert result.best()["step"] == 2
    table = summary.table([result], Recipe(targets=(1.5, 2.0, 2.5), optimizer=("sgd",)))
    assert [str(cell) for cell in table.columns[0].cells][:3] == [
        f"steps to held-out loss {goal}" for goal in ("2.5", "2", "1.5")
    ]


def test_an_incomplete_last_line_is_left_out(tmp_path):
    (tmp_path / "m").write_text('{"kind": "step"}\n{"kind": "st')
    assert list(summary.read(tmp_path / "m")) == [{"kind": "step"}]


def test_curves(folder, drawn):
    """They pass over a loss that is not finite, and show averaged weights if there are any."""
    write(folder, "thor", averages=(0.75, 0.85))
    metric = primary(TASK.metrics)
    draw_curves(
        [Result(name, folder.metrics(name), metric) for name in ("sgd", "thor")], folder.curves
    )
    [figure] = drawn
    loss, loss_by_time, accuracy, accuracy_by_time = (axes.get_lines() for axes in figure.axes)
    for panel, xs in ((loss, [1, 2, 4]), (loss_by_time, [4, 5, 8])):
        assert [line.get_xdata().tolist() for line in panel] == [xs, xs]
        assert panel[0].get_ydata().tolist() == pytest.approx([3.0, 2.9, 2.71])
    for panel, xs in ((accuracy, [2, 4]), (accuracy_by_time, [5, 8])):
        assert [line.get_xdata().tolist() for line in panel] == [xs, xs]
        assert [line.get_ydata().tolist() for line in panel] == [[0.8, 0.7], [0.75, 0.85]]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["sgd", "thor"]
    colours = [[line.get_color() for line in axes.get_lines()] for axes in figure.axes]
    assert colours == [colours[0]] * 4


def test_settings_of_matplotlib_for_other_work_do_not_matter(folder, tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    words = (
        "from torch_thor.training.summary import *\n"
        "metric = Metric('top1', 'accuracy', 'accuracy', True)\n"
        f"draw_curves([Result('sgd', Path({str(folder.metrics('sgd'))!r}), metric)],"
        f" Path({str(folder.curves)!r}))\n"
    )
    settings = {"MPLBACKEND": "Qt4Agg", "MATPLOTLIBRC": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", words], env={**os.environ, **settings}, check=True)
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
