"""`python -m benchmarks` in this process."""

import sys

import pytest

import warm
from benchmarks.__main__ import main
from benchmarks.runner import study


@pytest.fixture
def warm_studies(monkeypatch):
    """The processes of studies start at once."""
    context = warm.context()
    monkeypatch.setattr(study.multiprocessing, "get_context", lambda method: context)


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """Call it in an empty folder: `bench(*words)` gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def called(*words):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return called
