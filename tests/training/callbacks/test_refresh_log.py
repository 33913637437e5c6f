"""What a training writes about its refreshes: lines, a table and a picture; and how a recipe says when to refresh."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from torch_thor import THOR, intervals
from torch_thor.training import (
    Callback,
    UserError,
    load_recipe,
    override,
    parse_recipe,
    recipe_yaml,
    train,
)
from torch_thor.training import image_run as new_run
from torch_thor.training.callbacks import MetricsFile, read_metrics
from torch_thor.training.data import DataBundle, DataSpec, load_data
from torch_thor.training.reports import Summary, as_json, refresh_table, refreshed_layers, summary_table

GROWING = "{kind: geometric, first: 2, last: 5, factor: 1.5}"
WORDS = ["optimizer=thor", "epochs=2", "batch_size=32", "lr=0.005", f"update_interval={GROWING}", "damping=0.01"]


@pytest.fixture(scope="module")
def data():
    full = load_data(DataSpec("digits"))
    return DataBundle(full.train_images[:320], full.train_labels[:320], full.test_images, full.test_labels, 10)


@pytest.fixture
def trained(data):
    run = new_run(load_recipe("digits", [*WORDS, "trace_thresholds=[0.02,0.0003]"]), "thor", data)
    events = []

    class Watch(Callback):
        def after_step(self, run, point):
            events.extend((point.step, event) for event in run.optimizer.last_refresh)

    train(run, [Watch()])
    return run, events


def test_record_is_what_the_optimizer_told(trained):
    run, events = trained
    assert {event.decision.value for _, event in events} == {"update", "keep", "stop"}  # else this shows little
    assert [(p.step, p.layer, p.decision, p.trace_change, p.trace) for p in run.record.refreshes] == [
        (step, e.layer, e.decision.value, e.trace_change, e.trace) for step, e in events
    ]
    assert {step for step, _ in events} <= {1, 3, 6, 10, 15, 20}  # intervals 2, 3, 4, 5, 5: the schedule of the recipe
    assert {p.step for p in run.record.refreshes} == {p.step for p in run.record.steps if p.refresh}


def test_lines_come_back_as_they_were(trained, tmp_path):
    run, _ = trained
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.before_training(run)
    metrics.close()
    assert read_metrics(metrics.path) == run.record
    lines = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert [line["kind"] for line in lines[:6]] == ["step", *["refresh"] * 4, "step"]
    assert lines[1] == {
        "kind": "refresh", "step": 1, "layer": "conv1", "decision": "update", "trace_change": None,
        "trace": run.record.refreshes[0].trace,
    }  # fmt: skip


def test_numbers_that_json_lacks_are_null(data):
    run = new_run(load_recipe("digits", WORDS), "thor", data)

    class Poison(Callback):
        def after_step(self, run, point):
            if point.step == 2:  # before the pass of step 3, whose statistics then hold NaN
                statistics = run.optimizer.curvature["conv1"].statistics
                gather = statistics.gather
                statistics.gather = lambda kind, x, *rest, **named: gather(kind, x * torch.nan, *rest, **named)

    with pytest.warns(RuntimeWarning, match="NaN"):
        train(run, [Poison()])
    failed = [point for point in run.record.refreshes if point.decision == "failed"]
    assert {(point.step, point.layer) for point in failed} == {
        (3, "conv1"),
        (6, "conv1"),
        (10, "conv1"),
        (15, "conv1"),
        (20, "conv1"),
    }
    assert {(point.trace_change, point.trace) for point in failed} == {(None, None)}


# ------------------------------------------------------------------------------------- the command


@pytest.mark.pictures
def test_the_command_draws_a_picture_and_draws_it_again(run, tmp_path):
    """A run that is resumed knows all its refreshes, also those of the process before."""
    assert run("train", "digits", *WORDS, "epochs=1", "--out", "run")[0] == 0
    picture, summary = tmp_path / "run/thor/refreshes.png", (tmp_path / "run/summary.json").read_text()
    drawn = picture.read_bytes()
    assert drawn[:4] == b"\x89PNG"
    picture.unlink()
    assert run("train", "--resume", "--out", "run")[0] == 0
    assert picture.read_bytes() == drawn
    assert (tmp_path / "run/summary.json").read_text() == summary


def test_first_order_runs_have_no_picture(run, tmp_path):
    assert run("train", "digits", "optimizer=sgd", "epochs=1", "--out", "run")[0] == 0
    assert not list(tmp_path.rglob("refreshes.png"))
    assert (tmp_path / "run" / "curves.png").exists()


# --------------------------------------------------------------------------------- table and picture


def test_table_counts_what_happened(trained):
    run, events = trained
    refreshed = refreshed_layers(run.optimizer, run.record)
    decisions = [event.decision.value for _, event in events]
    assert sum(layer.refreshes for layer in refreshed) == decisions.count("update")
    assert sum(layer.kept for layer in refreshed) == decisions.count("keep")
    assert sum(layer.stopped for layer in refreshed) == decisions.count("stop")
    summary = Summary("thor", run.record, refreshed, run.task.metrics(), run.task.unit)
    text = io.StringIO()
    console = Console(file=text, width=100)
    console.print(refresh_table(summary))
    console.print(summary_table([summary], []))
    assert f"{decisions.count('update')} of {len(decisions)}" in text.getvalue()
    assert f"{decisions.count('stop')} of 4" in text.getvalue()
    counted = as_json(summary, [])["refreshed"]
    assert {name: values["refreshes"] for name, values in counted.items()} == {
        name: layer.refreshes for name, layer in run.optimizer.curvature.items()
    }


# --------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        ("7", 7),
        (GROWING, intervals.Geometric(2, 5, 1.5)),
        ("{kind: constant, interval: 3}", intervals.Constant(3)),
        (
            "{kind: piecewise, boundaries: [1, 2.5], intervals: [4, 8, 12], steps_per_epoch: 40}",
            intervals.Piecewise([1, 2.5], [4, 8, 12], steps_per_epoch=40),
        ),
    ],
)
def test_a_recipe_says_when_to_refresh(value, interval, data):
    recipe = load_recipe("digits", ["optimizer=thor", f"update_interval={value}"])
    assert parse_recipe(recipe_yaml(recipe), "other", []) == recipe
    optimizer = new_run(recipe, "thor", data).optimizer
    assert isinstance(optimizer, THOR)
    assert optimizer.param_groups[0]["update_interval"] == interval


def test_a_schedule_replaces_a_schedule_and_a_key_changes_one_in_it():
    recipe = load_recipe("digits", [f"update_interval={GROWING}"])
    for word, expected in [
        ("update_interval={kind: constant, interval: 3}", {"kind": "constant", "interval": 3}),
        ("update_interval=9", 9),
        ("update_interval.last=50", {"kind": "geometric", "first": 2, "last": 50, "factor": 1.5}),
        ("optimizers.thor.update_interval.last=50", {"kind": "geometric", "first": 2, "last": 50, "factor": 1.5}),
    ]:
        assert override(recipe, [word]).optimizers["thor"].update_interval == expected


@pytest.mark.parametrize("name", ["digits", "fashion-mnist"])  # the one has no thresholds, the other a pair
def test_a_recipe_names_a_preset(name, data):
    recipe = load_recipe(name, ["optimizer=thor", "trace_thresholds=thor_stop"])
    assert parse_recipe(recipe_yaml(recipe), name, []) == recipe
    assert new_run(recipe, "thor", data).optimizer.param_groups[0]["trace_thresholds"] == (0.01, 0.001)
    again = override(recipe, ["trace_thresholds=[0.5,0.25]"])
    assert replace(again.optimizers["thor"]).trace_thresholds == (0.5, 0.25)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("update_interval=often", "update_interval='often'.*{kind: geometric"),
        ("update_interval=0", "update_interval=0"),
        ("update_interval=2.5", "update_interval=2.5"),
        ("update_interval=null", "update_interval=None"),
        ("update_interval=[1,2]", "update_interval="),
        ("update_interval={first: 3}", "kind=None is not a schedule: use one of constant, piecewise, geometric"),
        ("update_interval={kind: linear}", "kind=linear is not a schedule"),
        ("update_interval={kind: constant, intervall: 3}", "constant takes interval, not intervall"),
        ("update_interval={kind: geometric, first: 9, last: 3, factor: 2}", "update_interval: last=3"),
        ("trace_thresholds=thor_sotp", "'thor_sotp' is not known; use one of 'thor', 'thor_stop', 'thor_nt'"),
        ("trace_thresholds=paper", "'paper' sets other options too .write max_update_ratio=null"),
        ("trace_thresholds=[0.1,0.2]", "must be a pair .ω1, ω2. of numbers with 0 ≤ ω2 ≤ ω1"),
        ("trace_thresholds=0.1", "trace_thresholds=0.1"),
        ("trace_thresholds.upper=0.1", "trace_thresholds"),
        ("optimizers=3", "optimizers"),
    ],
)
def test_mistakes_are_told_in_one_line(word, said):
    with pytest.raises(UserError, match=said) as caught:
        load_recipe("digits", [word])
    assert "\n" not in str(caught.value)
