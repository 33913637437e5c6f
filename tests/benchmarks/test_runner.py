"""The runner of studies: what is missing is run and stored, whatever fails or is cut off; stale
rows and `--verify`; the numbers in tables, step times, and what stands beside every result.
"""

import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import torch_thor
from benchmarks.runner import golden, study
from benchmarks.runner.machine import commit, provenance
from benchmarks.runner.markdown import table, with_error
from benchmarks.runner.numbers import apart, steps_to
from benchmarks.runner.stores import Lines, key_of
from benchmarks.runner.timing import median_ratio, state_bytes, take_turns, training_step
from torch_thor.errors import UserError

STUDY = """
import os
from pathlib import Path

def jobs(rows):
    first = [{"lr": lr, "seed": 0} for lr in (1, 2, 3)]
    if len(rows) < 3:
        return first
    best = min(rows.values(), key=lambda row: row["value"])["job"]["lr"]
    return [*first, {"lr": best, "seed": 1}, {"lr": best, "alone": True}]

def run(job):
    told = Path("told").read_text() if Path("told").exists() else ""
    if told == f"fail {job['lr']}":
        raise ValueError("no luck")
    if told == f"die {job['lr']}":
        os._exit(3)
    with open("ran", "a") as file:
        file.write(f"{job}\\n")
    if told == "diverge":
        return {"value": None}
    return {"value": (job["lr"] - 2) ** 2 + 0.1 * job.get("seed", 0) + (told == "drift")}

def optimizers(job):
    return ["THOR"] if job["lr"] == 2 else []

def table(rows):
    return f"best {min(row['value'] for row in rows.values())} of {len(rows)}"

def draw(rows):
    Path("drawn").write_text(table(rows))

def headlines(rows):
    return [{"lr": 2, "seed": 1}, {"lr": 2, "seed": 0}]

def tolerance(rows, job):
    return 0.5
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capfd, warm_studies):
    """The runner with a study and its options: what it prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(STUDY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results")

    def called(*words):
        monkeypatch.setattr(sys, "argv", ["toy", "--workers", "2", *words])
        study.main(importlib.import_module("toy"))
        return capfd.readouterr().out

    yield called
    sys.modules.pop("toy", None)


def ran():
    return Path("ran").read_text().splitlines()


@pytest.mark.slow
def test_results_lead_to_jobs_until_none_is_missing_and_rows_may_be_stale(call):
    assert "best 0.0 of 5" in call()
    assert len(ran()) == 5
    assert ran()[-1] == "{'lr': 2, 'alone': True}"
    assert Path("drawn").read_text() == "best 0.0 of 5"
    rows = [json.loads(line) for line in Path("results/toy.jsonl").read_text().splitlines()]
    thor = golden.present_numbers()["THOR"]
    for row in rows:
        assert row["numbers"] == ({"THOR": thor} if row["job"]["lr"] == 2 else {})
        assert row["command"] == "python -m benchmarks toy"
    assert "stale" not in call("--table")
    assert len(ran()) == 5
    store = Lines(Path("results/toy.jsonl"))
    row = store.rows["lr 2, seed 0"]
    store.keep("lr 2, seed 0", {**row, "numbers": {"THOR": thor - 1}})
    assert "stale: 1 of 5 rows" in call("--table")


@pytest.mark.slow
def test_what_is_left_after_a_failure_or_a_kill_is_run_again(call):
    for told, said in (("fail 2", "ValueError: no luck"), ("die 2", "BrokenProcessPool")):
        Path("told").write_text(told)
        with pytest.raises(UserError, match=f"1 jobs failed.*\nlr 2, seed 0: {said}"):
            call("--only", "seed 0")
        assert set(Lines(Path("results/toy.jsonl")).rows) == {"lr 1, seed 0", "lr 3, seed 0"}
    Path("told").unlink()
    assert "of 5" in call()
    assert len(ran()) == len(set(ran())) == 5  # none twice


@pytest.mark.slow
def test_verify_compares_headlines_with_what_is_recorded(call, capfd):
    call()
    for told, code, said in (
        ("", 0, "recorded 0.1, now 0.1: agrees"),
        ("drift", 1, "recorded 0.1, now 1.1: DIFFERS"),
        ("diverge", 1, "recorded 0.1, now diverged: DIFFERS"),
    ):
        Path("told").write_text(told)
        with pytest.raises(SystemExit) as stopped:
            call("--verify", "--only", "seed 1")
        assert stopped.value.code == code
        assert f"lr 2, seed 1: {said}\n" in capfd.readouterr().out
        assert {path.name for path in Path("results").iterdir()} == {"toy.jsonl", "toy.md"}


def test_bad_words_and_what_cannot_be_verified_are_errors(call):
    for words, said in (
        (("--workers", "0"), "--workers 0: give a whole number of 1 or more"),
        (("other",), "unrecognized arguments: other: `toy --help` says what is there"),
        (("--verify",), "2 rows to compare with are missing.*benchmarks toy` runs:\nlr 2, seed 1"),
        (("--verify", "--only", "lr 3"), "--only lr 3: no row that README shows has this"),
    ):
        with pytest.raises(UserError, match=said):
            call(*words)
    assert not Path("ran").exists()


def test_a_key_does_not_depend_on_the_order_of_options():
    job = {"seed": 0, "recipe": {"lr": 0.1, "schedule": {"kind": "cosine", "final": 0.0}}}
    other = {"recipe": {"schedule": {"final": 0.0, "kind": "cosine"}, "lr": 0.1}, "seed": 0}
    assert key_of(job) == key_of(other)
    other["recipe"]["schedule"]["final"] = 0.5
    assert key_of(job) != key_of(other)


def test_results_have_the_machine_and_the_commit(tmp_path):
    found = provenance()
    assert json.loads(json.dumps(found)) == found
    assert (found["torch"], found["torch_thor"]) == (torch.__version__, torch_thor.__version__)
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", found["commit"])
    (tmp_path / "mine.py").write_text("")
    assert commit(tmp_path / "mine.py") == "unknown"


# ---- numbers and times ---------------------------------------------------------------------------


def test_a_table_has_a_cell_for_each_column():
    expected = "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |"
    assert table(("a", "b"), [("1", "2"), ("3", "4")]) == expected
    with pytest.raises(ValueError, match="1 cells in a table of 2 columns"):
        table(("a", "b"), [("1",)])


@pytest.mark.parametrize(
    ("error", "mean", "cell"),
    [
        (0.0123, 1.5, "1.500 ± 0.012"), (0.0996, 1.5, "1.50 ± 0.10"), (0.0, 1.5, "1.5000 ± 0.0000"),
        (123.0, 1500.0, "1500 ± 123"), (1.9e-7, 2.4e-6, "(2.40 ± 0.19)e-6"),
        (2e-5, 9.99e-4, "(9.99 ± 0.20)e-4"),
    ],
)  # fmt: skip
def test_a_standard_error_has_two_digits(error, mean, cell):
    far = error * math.sqrt(3)  # the standard error of (-far, 0, far) is the error
    assert with_error([mean - far, mean, mean + far]) == cell


def test_the_first_step_that_reaches_a_target():
    rising = [(10, 0.5), (20, 0.7), (30, 0.6), (40, 0.9)]
    found = [steps_to(rising, target) for target in (0.4, 0.6, 0.8, 0.95)]
    assert found == [10, pytest.approx(15), pytest.approx(30 + 20 / 3), None]
    assert steps_to([(10, 8.0), (20, 4.0)], 5.0, higher=False) == 17.5


def test_two_runs_lie_apart_by_no_more_than_the_bound_in_19_of_20_cases():
    draws = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0)).tolist()
    near = sum(abs(first - other) <= apart([first, *rest]) for first, *rest, other in draws)
    assert 0.95 < near / len(draws) < 0.97


def test_steps_take_turns_in_changing_order_after_a_warm_up():
    now, order = 0.0, []

    def step(name):
        nonlocal now
        order.append(name)
        now += 5 if name == "thor" and order.count("thor") % 2 else 1

    def name_of(name):
        return "refresh" if name == "thor" and order.count("thor") % 2 else name

    steps = {name: lambda name=name: step(name) for name in ("sgd", "thor")}
    seconds = take_turns(steps, 8, name_of=name_of, clock=lambda: now)
    assert seconds == {"sgd": [1.0] * 8, "thor": [1.0] * 4, "refresh": [5.0] * 4}
    rounds = {tuple(order[i : i + 2]) for i in range(0, len(order), 2)}
    assert rounds == {("sgd", "thor"), ("thor", "sgd")}
    assert median_ratio([2.0, 40.0, 4.0], [1.0, 10.0, 4.0]) == 2.0  # within a round


def test_a_training_step_is_whole_and_its_state_is_counted():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    step = training_step(lambda: model(torch.ones(1, 2)).sum(), optimizer)
    step()
    step()
    # gradients of ones, momentum of 1 and 1.5: set to zero in between
    assert model.weight.tolist() == [[0.375, 0.375]]
    assert model.weight.grad is None
    assert state_bytes(optimizer) == 8
