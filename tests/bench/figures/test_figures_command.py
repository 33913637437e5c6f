"""`torch-thor figures` as typed: lists, results, and one-line errors with exit code 2."""

import os
import sys

import pytest

from torch_thor.cli import main
from torch_thor.training.lock import Lock


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Call the command line in an empty folder; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["torch-thor", "figures", *(str(word) for word in words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return call


def test_list_names_the_figures(run):
    code, out, _ = run("--list")
    assert code == 0
    for name in ("curves", "fisher-norm", "split-dim", "batch-sizes", "all"):
        assert name in out


def test_one_command_makes_a_figure(run, tmp_path):
    words = ("batch-sizes", "--data", "digits", "--epochs", "1", "--batch-sizes", "512", "--device", "cpu")
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert "Theirs, not ours" in out
    made = {path.name for path in (tmp_path / "runs" / "figures").glob("[!.]*")}
    assert made == {"batch-sizes.json", "batch-sizes.png", "batch-sizes.md"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a figure (curves, fisher-norm, split-dim, batch-sizes) or all"),
        (("curve",), "there is no figure curve (did you mean curves?)"),
        (("curves", "--seeds", "one"), "--seeds one: give whole numbers"),
        (("curves", "--seeds", "1,1"), "--seeds 1,1: give different whole numbers of 0 or more"),
        (("curves", "--seeds", "-1"), "--seeds -1: give different whole numbers of 0 or more"),
        (("batch-sizes", "--batch-sizes", "0,8"), "--batch-sizes 0,8: give different whole numbers of 1 or more"),
        (("curves", "--epochs", "0"), "epochs=0 must be 1 or more"),
        (("curves", "--data", "mnist"), "there is no recipe mnist"),
        (("curves", "--device", "abacus"), "device=abacus cannot be used"),
        (("curves", "--redraw"), "is not there, so there is nothing to draw again"),
        (("split-dim", "--pixels", "0"), "--pixels 0: give 1 or more"),
        (("fisher-norm", "--model", "resnet18"), "--model means nothing to fisher-norm"),
    ],
    ids=[
        "none",
        "unknown",
        "word",
        "twice",
        "negative",
        "zero",
        "epochs",
        "data",
        "device",
        "redraw",
        "pixels",
        "model",
    ],
)
def test_bad_words_are_one_line(run, words, said):
    code, _, err = run(*words)
    assert code == 2
    assert err.startswith("torch-thor: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_file_is_no_folder(run, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    code, _, err = run("curves", "--out", taken)
    assert code == 2
    assert "is a file: choose another folder with --out" in err
    assert taken.read_text() == "mine"


def test_two_processes_do_not_measure_the_same_figure(run, tmp_path):
    (tmp_path / "out").mkdir()
    with Lock(tmp_path / "out" / ".curves.lock", "it", "wait") as lock:
        lock.take()
        code, _, err = run("curves", "--data", "digits", "--out", "out")
    assert code == 2
    assert f"torch-thor: figure curves in out is in use by process {os.getpid()} on " in err
    assert err.count("\n") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".curves.lock"]
