"""`python -m benchmarks` in this process."""

import sys

import pytest

from benchmarks.__main__ import main


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
