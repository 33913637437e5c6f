"""The final table, the comparison, `summary.json` and the curves, of hand-made metrics files."""

import io
import json
import math
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from torch_thor.errors import UserError
from torch_thor.training import summary
from torch_thor.training.curves import draw_curves
from torch_thor.training.folder import RunFolder
from torch_thor.training.loop import Score
from torch_thor.training.observers import Metrics
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.summary import CURVE, Result, compared, report
from torch_thor.training.tasks.images import ImageClassification
from torch_thor.training.tasks.task import Metric, primary

TASK = SimpleNamespace(metrics=ImageClassification.metrics, unit="images")
DURATIONS, LOSSES = (4.0, 1.0, 2.0, 1.0), (3.0, 2.0, math.nan, 1.0)


def write(folder, name, finals=(0.8, 0.7), averages=(None, None)):
    """Four steps, the first with a refresh and the third skipped; evaluations after two and after
    four.
    """
    metrics, run, at = Metrics(folder.metrics(name)), SimpleNamespace(task=TASK), 0.0
    for step, (duration, loss) in enumerate(zip(DURATIONS, LOSSES, strict=True), 1):
        at += duration
        times = {"duration": duration, "seconds": at, "waited": duration / 4}
        metrics._write(
            "step",
            {
                "step": step,
                "loss": loss,
                "terms": 8,
                "refresh": step == 1,
                "skipped": step == 3,
                **times,
            },
        )
        decided = {1: [("a", "update"), ("b", "failed")], 4: [("a", "keep"), ("b", "stop")]}.get(
            step, []
        )
        for layer, decision in decided:
            metrics._write("refresh", {"step": step, "layer": layer, "decision": decision})
        if step % 2 == 0:
            top1, average = finals[step // 2 - 1], averages[step // 2 - 1]
            averaged = None if average is None else {"loss": 0.5, "top1": average, "top5": 0.95}
            metrics.evaluation(
                run, Score(step, at, {"loss": 1.0, "top1": top1, "top5": 0.9}, averaged)
            )
    metrics.close()


def reported(folder, **keys):
    """(rows of the table, other lines, summary.json)."""
    recipe, console = (
        Recipe(optimizer=keys.pop("optimizer", ("sgd",)), **keys),
        Console(file=io.StringIO(), width=120),
    )
    report(folder, recipe, TASK, console)
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


def test_one_optimizer(folder):
    table, lines, [told] = reported(folder, targets=(0.1, 0.2, 0.7597, 0.9))
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
        "optimizer": "sgd", "steps": 4, "seconds": 8.0, "loss": 1.0, "top1": 0.7, "top5": 0.9,
        "averaged_loss": None,
        "averaged_top1": None, "averaged_top5": None, "best": {"step": 2, "top1": 0.8},
        "stop_at": None,
        "ended_at_target": False, "images_per_second": 4.0, "waiting_for_data": 0.25,
        "skipped_steps": 1,
        "ordinary_step_seconds": 1.0, "refresh_step_seconds": 4.0,
        "targets": {"0.1": {"steps": 2, "seconds": 5.0}, "0.2": {"steps": 2, "seconds": 5.0},
                    "0.7597": {"steps": 2, "seconds": 5.0}, "0.9": None},
        "decisions": {"a": {"update": 1, "keep": 1}, "b": {"failed": 1, "stop": 1}},
    }  # fmt: skip


def test_averaged_weights_decide_where_there_are_any(folder):
    write(folder, "sgd", averages=(0.75, 0.85))
    table, _, [told] = reported(folder, ema_decay=0.9, stop_at=0.85)
    assert table["final accuracy of averaged weights"] == ["85.00%"]
    assert table["steps to accuracy 85%"] == ["4 (8.0 s)"]
    assert (told["top1"], told["averaged_top1"], told["best"]) == (
        0.7,
        0.85,
        {"step": 4, "top1": 0.85},
    )
    assert told["ended_at_target"]


def test_a_value_that_is_not_finite_is_null_as_json_has_it(folder):
    write(folder, "sgd", (math.nan, math.nan))
    _, _, [told] = reported(folder)
    assert told["best"] == {"step": 2, "top1": None}
    assert "NaN" not in folder.summary.read_text()


def test_the_sentence_compares_with_adamw_or_the_last(folder):
    for name, finals in {
        "thor-muon": (0.75, 0.9),
        "adamw": (0.7, 0.75),
        "muon": (0.5, 0.6),
    }.items():
        write(folder, name, finals)
    took = "thor-muon 2 (5.0 s), adamw 4 (8.0 s), muon not reached"
    _, lines, _ = reported(folder, optimizer=("thor-muon", "adamw", "muon"))
    assert lines[0] == f"Steps to what adamw ends with (accuracy 75.00%): {took}"
    _, lines, _ = reported(folder, optimizer=("muon", "thor-muon"))
    took = "muon not reached, thor-muon 4 (8.0 s)"
    assert lines[0] == f"Steps to what thor-muon ends with (accuracy 90.00%): {took}"
    write(folder, "adamw", (0.7, math.nan))
    _, lines, _ = reported(folder, optimizer=("thor-muon", "adamw"))
    assert len(lines) == 1  # nothing can be said of a metric that is not a number


def test_a_loss_is_reached_from_above(tmp_path):
    path = tmp_path / "m"
    lines = [
        {"kind": "eval", "step": n, "seconds": n / 10, "loss": loss}
        for n, loss in enumerate((3.0, None, 2.0, 2.5))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = Result(
        "one", path, Metric("loss", "loss", "held-out loss", higher_is_better=False, primary=True)
    )
    assert [
        result.reaching(goal) and result.reaching(goal)["step"] for goal in (3.0, 2.5, 2.0, 1.9)
    ] == [0, 2, 2, None]
    assert result.best()["step"] == 2
    assert compared([result]) == ""
    table = summary.table([result], Recipe(targets=(1.5, 2.0, 2.5, 3.0), optimizer=("sgd",)))
    assert [str(cell) for cell in table.columns[0].cells][:3] == [
        f"steps to held-out loss {goal}" for goal in ("2.5", "2", "1.5")
    ]


def test_the_memory_of_a_long_training_is_a_number_a_step(tmp_path):
    with (tmp_path / "m").open("w") as file:
        for step in range(1, 50_001):
            at = {
                "step": step,
                "seconds": step / 8,
                "duration": 0.125,
                "waited": 0.0,
                "terms": 1,
                "skipped": False,
            }
            file.write(
                json.dumps({"kind": "step", "loss": 2.0, "refresh": step % 10 == 1, **at}) + "\n"
            )
    result = Result("one", tmp_path / "m", primary(TASK.metrics))
    assert CURVE <= len(result.curve) < 2 * CURVE
    steps = [step for step, _, _ in result.curve]
    assert steps == list(range(16, 50_001, 16))  # evenly, to the end


def test_curves_pass_over_a_loss_that_is_not_finite_and_show_averages(
    folder, monkeypatch, tmp_path
):
    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.touch())
    )
    write(folder, "sgd", averages=(0.75, 0.85))
    draw_curves(
        [Result("sgd", folder.metrics("sgd"), primary(TASK.metrics))], tmp_path / "curves.png"
    )
    loss, _, accuracy, seconds = drawn[0].axes
    assert loss.get_lines()[0].get_ydata().tolist() == pytest.approx([3.0, 2.9, 2.9, 2.71])
    assert loss.get_lines()[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert [line.get_ydata().tolist() for line in accuracy.get_lines()] == [
        [0.8, 0.7],
        [0.75, 0.85],
    ]
    assert [line.get_label() for line in seconds.get_lines()] == ["sgd", "sgd, averaged weights"]
    assert seconds.get_lines()[1].get_xdata().tolist() == [5.0, 8.0]


def test_reading_leaves_out_an_incomplete_line_and_refuses_others(tmp_path):
    (tmp_path / "m").write_text('{"kind": "step"}\n{"kind": "st')
    assert list(summary.read(tmp_path / "m")) == [{"kind": "step"}]
    (tmp_path / "m").write_text('{"kind": "st\n{"kind": "step"}\n')
    for path in (tmp_path / "m", tmp_path / "missing"):
        with pytest.raises(
            UserError, match=f"{path.name} cannot be read .*: start again with --overwrite or --out"
        ):
            list(summary.read(path))
