"""A comparison as it is typed: stages, failures, Ctrl-C, and a runner that is killed."""

import os
import signal
import textwrap

import pytest

from command_line import assert_ends, descendants, finish, start, wait_for
from torch_thor.bench import Folder, script
from torch_thor.training import UserError

COMPARISON = """
import json, os, time
from dataclasses import dataclass
from pathlib import Path

from torch_thor.bench import script
from torch_thor.bench import Folder

STORE = Folder(Path("results"))

@dataclass(frozen=True)
class Job:
    key: str

    def run(self):
        Path(f"{self.key}.pid").write_text(str(os.getpid()))
        if self.key == "slow":
            time.sleep(3600)
        if self.key.startswith("bad"):
            raise ValueError("no")
        return {"key": self.key}

def second():
    return [Job(STORE.read(key)["key"] + " again") for key in ("first", "other")]

if __name__ == "__main__":
    parser = script.parser(__doc__, workers=2)
    parser.add_argument("--add")
    options = parser.parse_args()
    first = [Job("first"), Job("other"), *([Job(options.add)] if options.add else [])]
    if not options.table:
        script.measure(STORE, [lambda: first, second], options.workers)
    print("shown:", *sorted(path.stem for path in Path("results").glob("*.json")))
"""


@pytest.fixture
def comparison(tmp_path):
    path = tmp_path / "comparison.py"
    path.write_text(textwrap.dedent(COMPARISON))
    return path


def kept(folder):
    return sorted(path.name for path in (folder / "results").iterdir())


@pytest.mark.slow
def test_later_stages_see_the_results_of_those_before(comparison, tmp_path):
    code, out, err = finish(start(tmp_path, script=comparison))
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "shown: first first again other other again"
    (tmp_path / "results" / "other again.json").unlink()
    code, out, err = finish(start(tmp_path, script=comparison))
    assert (code, out.splitlines()[0]) == (0, "1 of 1 done: other again")
    code, out, err = finish(start(tmp_path, "--table", script=comparison))
    assert (code, out) == (0, "shown: first first again other other again\n")


def test_a_stage_with_failures_is_the_last(comparison, tmp_path):
    code, out, err = finish(start(tmp_path, "--add", "bad", "--workers", "1", script=comparison))
    assert code == 1
    assert err.startswith("1 job failed (bad): tracebacks are in results/*.failed")
    assert "shown:" not in out
    assert kept(tmp_path) == ["bad.failed", "first.json", "other.json"]


def test_ctrl_c_leaves_what_is_done(comparison, tmp_path):
    process = start(tmp_path, "--add", "slow", script=comparison)
    done = [tmp_path / "results" / f"{key}.json" for key in ("first", "other")]
    wait_for(process, lambda: all(p.exists() for p in (*done, tmp_path / "slow.pid")), "result beside the slow job")
    wait_for(process, lambda: (tmp_path / "slow.pid").read_text(), "number of the slow job")
    slow = int((tmp_path / "slow.pid").read_text())
    assert slow in descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the runner and to all that it started
    code, out, err = finish(process)
    assert code == 130
    assert out.splitlines()[-1].startswith("stopped by Ctrl-C: what is done is kept")
    assert err == ""
    assert_ends(slow)
    assert kept(tmp_path) == ["first.json", "other.json"]


def test_a_job_does_not_outlive_a_runner_that_is_killed(comparison, tmp_path):
    process = start(tmp_path, "--add", "slow", script=comparison)
    pid = tmp_path / "slow.pid"
    wait_for(process, lambda: pid.exists() and pid.read_text(), "slow job")
    slow = int(pid.read_text())
    os.kill(process.pid, signal.SIGKILL)
    finish(process)  # the job holds its standard output: this ends when the job has ended
    assert_ends(slow)


def test_a_result_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    def full(*words, **options):
        raise UserError("run.json cannot be written (No space left on device): make room for it")

    monkeypatch.setattr(script, "complete", full)
    with pytest.raises(SystemExit, match=r"^run\.json cannot be written"):
        script.measure(Folder(tmp_path), [list], 1)


@pytest.mark.parametrize("words", ["0", "-1", "two", "1.5"])
def test_workers_are_a_whole_number(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.parser("about").parse_args(["--workers", words])
    assert stopped.value.code == 2
    assert f"{words}: give a whole number of 1 or more" in capsys.readouterr().err


def test_workers_are_the_cores_unless_a_script_says_otherwise(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert script.parser("about").parse_args([]).workers == 5
    assert script.parser("about", workers=1).parse_args([]).workers == 1
    assert script.parser("about", workers=1).parse_args(["--workers", "3", "--table"]).workers == 3
