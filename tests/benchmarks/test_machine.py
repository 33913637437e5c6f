"""What stands beside every result: the machine, the versions, and the commit where there is one."""

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_thor
from benchmarks.runner.machine import commit, provenance

ROOT = Path(__file__).parents[2]


def test_the_keys_that_raw_data_have():
    found = provenance()
    assert json.loads(json.dumps(found)) == found
    rows = (ROOT / "benchmarks/results/suite.jsonl").read_text().splitlines()
    assert set(found) < set(json.loads(rows[0]))
    assert (found["torch"], found["torch_thor"]) == (torch.__version__, torch_thor.__version__)
    assert found["threads"] == torch.get_num_threads()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_a_repository_which_tracks_the_file(tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    file = tmp_path / "mine.py"
    file.write_text("")
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "a repository that happens to lie around the file")
    assert commit(file) == "unknown"
    git("add", "mine.py")
    git("commit", "-q", "-m", "the file")
    assert commit(file) == git("rev-parse", "HEAD")
    monkeypatch.setenv("PATH", "")  # git is not installed
    assert commit(file) == provenance()["commit"] == "unknown"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_taken_again_without_page_faults():
    code = """
import resource
import torch
from benchmarks.runner.machine import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(9 * 2**20)  # more than the 32 MiB which glibc may keep by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = min(faults() for _ in range(3))
keep_freed_memory()
# Small objects may come to lie behind each of the first ones, which are too short then.
print(usual, min(faults() for _ in range(30)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    usual, now = map(int, done.stdout.split())
    assert usual > 1000
    assert now < usual / 100
