"""The runner: what is missing runs in processes of its own, failures are named, and what is done is kept."""

import json
import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_thor.bench import Folder, complete, complete_here, missing
from torch_thor.bench.runner import _outcome


@dataclass(frozen=True)
class Job:
    key: str
    kind: str = "good"
    flag: Path | None = None

    def run(self):
        if self.kind == "bad":
            raise ValueError("no such thing\nas far as one can see")
        if self.kind == "leaves":
            raise SystemExit("gone")
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "silent":
            os._exit(3)
        if self.kind == "unwritable":
            return {"what": object()}
        if self.kind == "needs flag":
            return {"flag": self.flag.read_text()}
        threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        return {"threads": threads, "process": os.getpid(), "pair": (1, 2.5), "worst": float("inf")}


@pytest.fixture
def store(tmp_path):
    return Folder(tmp_path / "results")


def test_what_is_missing_runs_elsewhere_and_is_kept(store, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    store.keep("b", {"old": True})
    lines = []
    assert complete([Job(key) for key in "aabca"], store, workers=2, threads=3, say=lines.append) == []
    assert store.read("b") == {"old": True}
    results = [store.read(key) for key in "ac"]
    for result in results:
        assert result["threads"] == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
        assert (result["pair"], result["worst"]) == ([1, 2.5], float("inf"))
    assert len({os.getpid(), *(result["process"] for result in results)}) == 3
    assert sorted(line.partition(": ")[2] for line in lines) == ["a", "c"]
    assert [line.partition(": ")[0] for line in lines] == ["1 of 2 done", "2 of 2 done"]
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ
    assert sorted(path.name for path in store.folder.iterdir()) == ["a.json", "b.json", "c.json"]


def test_a_failure_is_named_and_the_rest_goes_on(store, tmp_path):
    kinds = ("bad", "leaves", "killed", "silent", "unwritable", "good")
    lines = []
    failures = complete([Job(kind, kind) for kind in kinds], store, workers=2, say=lines.append)
    reasons = {failure.key: failure.reason for failure in failures}
    assert set(reasons) == set(kinds) - {"good"}
    assert reasons["bad"] == "ValueError: no such thing"
    assert reasons["leaves"] == "SystemExit: gone"
    assert "SIGKILL" in reasons["killed"]
    assert "exit code 3" in reasons["silent"]
    assert "not JSON serializable" in reasons["unwritable"]
    assert store.holds("good")
    assert not any(store.holds(key) for key in reasons)
    for key, reason in reasons.items():
        assert (store.folder / f"{key}.failed").read_text().startswith(reason)
        assert any(key in line and reason in line for line in lines)
    assert "ValueError: no such thing\nas far as one can see" in (store.folder / "bad.failed").read_text()


def test_a_job_that_failed_runs_again(store, tmp_path):
    job = Job("job", "needs flag", tmp_path / "flag")
    quiet = {"workers": 1, "say": lambda line: None}
    (failure,) = complete([job], store, **quiet)
    assert failure.reason.startswith("FileNotFoundError")
    assert (store.folder / "job.failed").exists()
    (tmp_path / "flag").write_text("here")
    assert complete([job], store, **quiet) == []
    assert store.read("job") == {"flag": "here"}
    assert not (store.folder / "job.failed").exists()


def test_anew_replaces_what_is_there_once_it_is_done(store):
    for key in ("good", "bad"):
        store.keep(key, {"old": True})
    jobs = [Job("good"), Job("bad", "bad")]
    assert len(complete(jobs, store, workers=2, anew=True, say=lambda line: None)) == 1
    assert "threads" in store.read("good")
    assert store.read("bad") == {"old": True}


def test_nothing_missing_starts_nothing(store, monkeypatch):
    store.keep("a", {})
    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", lambda process: pytest.fail("started"))
    assert complete([Job("a")], store, workers=1) == []
    assert not missing([Job("a")], store)


def test_here_the_first_error_ends_it(store, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # which the job reports
        monkeypatch.setenv(name, "1")
    lines = []
    with pytest.raises(ValueError, match="no such thing"):
        complete_here([Job("a"), Job("b", "bad"), Job("c")], store, say=lines.append)
    assert (store.holds("a"), store.holds("b"), store.holds("c")) == (True, False, False)
    assert lines == ["1 of 3 done: a"]
    assert store.read("a")["process"] == os.getpid()
    assert complete_here([Job("a"), Job("c")], store, say=lines.append) == 1
    assert complete_here([Job("a"), Job("c")], store, say=lines.append) == 0
    assert json.loads(store.file("c").read_text()) == store.read("c")


def test_a_result_that_was_sent_in_part_is_none():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    os.write(theirs.fileno(), (1000).to_bytes(4, "big") + b"half of it")
    theirs.close()
    process = SimpleNamespace(join=lambda: None, exitcode=-signal.SIGTERM)
    failure = _outcome(ours, Job("a"), process)
    assert (failure.key, "SIGTERM" in failure.reason) == ("a", True)
