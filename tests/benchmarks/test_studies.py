"""The studies: their raw data are whole, and their tables stand beside them and in README."""

import importlib
import re
from pathlib import Path

import pytest

from benchmarks import finetuning, front, suite_problems
from benchmarks.problems import PROBLEMS
from benchmarks.runner import study as runner
from benchmarks.runner.golden import present_numbers
from benchmarks.runner.stores import Lines, key_of
from golden.runs import RUNS_OF

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = ("ablation", "anytime", "finetuning", "nanogpt", "peers", "step_time", "suite")


def study(name):
    return importlib.import_module(f"benchmarks.{name}")


def rows_of(name):
    return Lines(RESULTS / f"{name}.jsonl").rows


def test_rows_have_the_numbers_of_the_optimizers_that_made_them():
    present = present_numbers()
    assert present.keys() == RUNS_OF.keys()
    for path in RESULTS.rglob("*.jsonl"):
        for key, row in Lines(path).rows.items():
            assert all(number <= present[name] for name, number in row["numbers"].items()), key
            if path.stem in STUDIES:
                assert row["numbers"].keys() == set(study(path.stem).optimizers(row["job"])), key


@pytest.mark.parametrize("name", STUDIES)
def test_no_job_is_left_and_the_tables_are_those_of_the_raw_data(name):
    rows = rows_of(name)
    assert [key_of(job) for job in study(name).jobs(rows) if key_of(job) not in rows] == []
    tables = study(name).table(rows)
    assert tables.count("\n") > 1
    assert (RESULTS / f"{name}.md").read_text() == runner.page(name, tables)


@pytest.mark.parametrize("name", ["finetuning", "nanogpt", "peers", "step_time", "suite"])
def test_each_row_that_readme_shows_can_be_run_again(name):
    shown, rows = study(name), rows_of(name)
    assert shown.headlines(rows)
    for job in shown.headlines(rows):
        assert rows[key_of(job)]["value"] is not None
        assert shown.tolerance(rows, job) > 0


def test_readme_shows_the_raw_data():
    text = (ROOT / "README.md").read_text()
    table = front.table(*map(front.rows_of, front.STUDIES), front.of_gpu())
    assert table in text
    assert table.count("\n") == 7
    assert len(text.split()) <= 700


def test_pages_show_means_and_errors_of_the_tables():
    mean = re.compile(r"[\d.]+ ± [\d.]*\d")
    known = {found for path in RESULTS.rglob("*.md") for found in mean.findall(path.read_text())}
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert set(mean.findall(path.read_text())) <= known, path


@pytest.mark.pictures
def test_readmes_picture_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "PICTURE", tmp_path / "front.png")
    front.draw(rows_of("nanogpt"), rows_of("finetuning"))
    assert front.PICTURE.stat().st_size > 10_000


def test_the_learning_rate_of_adamw_is_chosen_by_the_other_half_and_other_seeds():
    tuned, rows = study("finetuning"), {}
    for lr, seed, value in (
        (2e-5, 10, 1.6), (5e-5, 10, 1.3), (1e-4, 10, 1.4), (1e-4, 0, 0.1), (2e-4, 10, 1.5),
        (5e-4, 10, 1.2), (1e-3, 10, 1.25),
    ):  # fmt: skip
        job = {"task": "gpt-adamw", "optimizer": "torch-adamw", "lr": lr, "seed": seed}
        rows[key_of(job)] = {"job": job, "value": value}
    assert tuned.chosen_rate(rows, "gpt-adamw", tuned.ADAMW[False]) == 5e-5  # a loss
    assert tuned.chosen_rate(rows, "gpt-adamw", None) is None  # 2e-3 is missing
    job = {"task": "gpt-adamw", "optimizer": "torch-adamw", "lr": 2e-3, "seed": 10}
    rows[key_of(job)] = {"job": job, "value": 1.7}
    assert tuned.chosen_rate(rows, "gpt-adamw", None) == 5e-4


def test_forms_and_peers_have_jobs_that_lead_on():
    """Of the ablation and of Muon and SOAP in fine-tuning: three trials, then two, then seeds."""
    for name in ("ablation", "peers"):
        tuned, rows, rounds = study(name), {}, 0
        while todo := [job for job in tuned.jobs(rows) if key_of(job) not in rows]:
            rounds += 1
            for job in todo:
                rows[key_of(job)] = {"job": job, "value": 0.5 + job.get("lr", 0.0)}
        assert rounds == 4
        # what is not tried: Muon with momentum 0.8 in the suite, Newton-Muon with an LSTM
        assert tuned.table(rows).count("–") == (6 if name == "ablation" else 0)


def test_a_name_means_the_same_problem_in_all_studies():
    for problems in (suite_problems.PROBLEMS, finetuning.PROBLEMS, finetuning.UNSEEN):
        assert all(PROBLEMS[name] is problem for name, problem in problems.items())
