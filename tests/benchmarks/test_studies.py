"""The studies: their raw data are whole, and their tables stand beside them."""

import importlib
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import finetuning, suite_problems
from benchmarks.problems import PROBLEMS
from benchmarks.runner import study as runner
from benchmarks.runner.golden import present_numbers
from benchmarks.runner.stores import Lines, key_of
from golden.runs import RUNS_OF

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STUDIES = ("anytime", "finetuning", "nanogpt", "step_time", "suite", "wikitext")


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


def test_the_order_of_options_is_no_part_of_a_job():
    job = {"seed": 0, "recipe": {"lr": 0.1, "schedule": {"kind": "cosine", "final": 0.0}}}
    other = {"recipe": {"schedule": {"final": 0.0, "kind": "cosine"}, "lr": 0.1}, "seed": 0}
    assert key_of(job) == key_of(other)
    other["recipe"]["schedule"]["final"] = 0.5
    assert key_of(job) != key_of(other)


@pytest.mark.parametrize("name", ["finetuning", "nanogpt", "step_time", "suite"])
def test_each_row_that_readme_shows_can_be_run_again(name):
    one, rows = study(name), rows_of(name)
    headlines = one.headlines(rows)
    assert headlines
    for job in headlines:
        assert rows[key_of(job)]["value"] is not None
        assert one.tolerance(rows, job) > 0


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


def test_every_problem_is_drawn_with_its_means_and_standard_errors():
    tuned, axes = study("finetuning"), Figure().subplots()
    problems = {"gpt-adamw": "a", "minilm-trec": "b"}
    tuned.compare(axes, rows_of("finetuning"), problems, tuple(tuned.COLOURS))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert len(axes.containers) == 6
    adamw = axes.containers[2]  # the last of the first problem: 1.38817 ± 0.00062 in the table
    assert adamw.lines[0].get_xdata() == pytest.approx([1.38817], abs=5e-6)
    ends = adamw.lines[2][0].get_segments()[0][:, 0]
    assert (ends[1] - ends[0]) / 2 == pytest.approx(0.00062, abs=5e-6)


def test_forms_and_peers_have_jobs_that_lead_on():
    """Of the ablation and of Muon and SOAP in fine-tuning: three trials, then two, then seeds."""
    for name in ("ablation", "peers"):
        one, rows, rounds = study(name), {}, 0
        while todo := [job for job in one.jobs(rows) if key_of(job) not in rows]:
            rounds += 1
            for job in todo:
                rows[key_of(job)] = {"job": job, "value": 0.5 + job.get("lr", 0.0)}
        assert rounds == 4
        # what is not tried: Muon with momentum 0.8 in the suite, Newton-Muon with an LSTM
        assert one.table(rows).count("–") == (4 if name == "ablation" else 0)


def test_a_name_means_the_same_problem_in_all_studies():
    for problems in (suite_problems.PROBLEMS, finetuning.PROBLEMS, finetuning.UNSEEN):
        assert all(PROBLEMS[name] is problem for name, problem in problems.items())
