"""The runner of studies: what is missing is run and stored, whatever fails or is cut off; stale
rows and `--verify`.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.runner import golden, study
from benchmarks.runner.stores import Lines, key_of
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
def test_results_lead_to_jobs_until_none_is_missing(call, tmp_path):
    assert "best 0.0 of 5" in call()
    assert len(ran()) == 5
    assert ran()[-1] == "{'lr': 2, 'alone': True}"
    assert Path("drawn").read_text() == "best 0.0 of 5"
    rows = [json.loads(line) for line in Path("results/toy.jsonl").read_text().splitlines()]
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{40}|unknown", row["commit"])
        thor = golden.present_numbers()["THOR"]
        assert row["numbers"] == ({"THOR": thor} if row["job"]["lr"] == 2 else {})
        assert row["command"] == "python -m benchmarks toy"
        assert {"dirty", "processor", "instructions", "blas", "threads", "torch"} <= set(row)
    assert "stale" not in call("--table")
    assert len(ran()) == 5
    assert key_of({"seed": 0, "lr": 1}) == "lr 1, seed 0"
    store = Lines(Path("results/toy.jsonl"))
    row = store.rows["lr 2, seed 0"]
    store.keep("lr 2, seed 0", {**row, "numbers": {"THOR": row["numbers"]["THOR"] - 1}})
    assert "stale: 1 of 5 rows" in call("--table")


def test_a_row_is_stale_once_the_number_of_one_of_its_optimizers_has_risen():
    row = {"numbers": golden.numbers_of(["THOR", "LAMB"])}
    earlier = {"numbers": {**row["numbers"], "LAMB": 0}}
    assert not golden.is_stale({"numbers": {}})
    assert not golden.is_stale(row)
    assert golden.is_stale(earlier)


@pytest.mark.slow
def test_what_is_left_after_a_failure_or_a_kill_is_run_again(call):
    for told, said in (("fail 2", "ValueError: no luck"), ("die 2", "BrokenProcessPool")):
        Path("told").write_text(told)
        with pytest.raises(UserError, match=f"1 jobs failed.*\nlr 2, seed 0: {said}"):
            call("--only", "seed 0")
        assert set(Lines(Path("results/toy.jsonl")).rows) == {
            "lr 1, seed 0",
            "lr 3, seed 0",
        }
    Path("told").unlink()
    assert "of 5" in call()
    assert len(ran()) == len(set(ran())) == 5  # none twice


@pytest.mark.slow
def test_verify_compares_headlines_with_what_is_recorded(call, capfd):
    call()
    for told, code, said in (
        ("", 0, "recorded 0.1, now 0.1: agrees"),
        ("drift", 1, "recorded 0.1, now 1.1: DIFFERS"),
    ):
        Path("told").write_text(told)
        with pytest.raises(SystemExit) as stopped:
            call("--verify")
        assert stopped.value.code == code
        assert said in capfd.readouterr().out
        assert {path.name for path in Path("results").iterdir()} == {"toy.jsonl", "toy.md"}
    for told, now in (("drift", "1"), ("diverge", "diverged")):
        Path("told").write_text(told)
        with pytest.raises(SystemExit, match="1"):
            call("--verify", "--only", "seed 0")
        lines = [line for line in capfd.readouterr().out.splitlines() if "recorded" in line]
        assert lines == [f"lr 2, seed 0: recorded 0, now {now}: DIFFERS"]


def test_what_cannot_be_verified_is_said(call, monkeypatch):
    said = r"2 rows to compare with are missing.*`python -m benchmarks toy` runs:\nlr 2, seed 1"
    with pytest.raises(UserError, match=said):
        call("--verify")
    said = "--only lr 3: no row that README shows has this; they are\nlr 2, seed 1\nlr 2, seed 0"
    with pytest.raises(UserError, match=said):
        call("--verify", "--only", "lr 3")
    monkeypatch.delattr(importlib.import_module("toy"), "headlines")
    with pytest.raises(UserError, match="toy: README shows none of its numbers"):
        call("--verify")
    assert not Path("ran").exists()


def test_bad_words_are_one_line_and_a_full_disk_loses_nothing(call, monkeypatch, tmp_path):
    for words, said in (
        (("--workers", "0"), "--workers 0: give a whole number of 1 or more"),
        (("other",), "unrecognized arguments: other: `toy --help` says what is there"),
    ):
        with pytest.raises(UserError, match=said):
            call(*words)

    def full(self, text, encoding):
        self.write_bytes(text.encode()[:3])
        raise OSError(28, "No space left on device")

    store = Lines(tmp_path / "results" / "toy.jsonl")
    store.keep("lr 1", {"job": {"lr": 1}})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left on device"):
        store.keep("lr 2", {"job": {"lr": 2}})
    monkeypatch.undo()
    assert set(Lines(store.path).rows) == {"lr 1"}
