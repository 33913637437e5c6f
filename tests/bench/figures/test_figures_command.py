"""`torch-thor figures` as typed: lists, results, and one-line errors with exit code 2."""

import functools
import os

import pytest
from filelock import FileLock

from command_line import assert_refused


@pytest.fixture
def figures(run):
    """Call `torch-thor figures` in an empty folder; gives (exit code, stdout, stderr)."""
    return functools.partial(run, "figures")


def test_list_names_the_figures(figures):
    code, out, _ = figures("--list")
    assert code == 0
    for name in ("curves", "fisher-norm", "split-dim", "batch-sizes", "bert", "all"):
        assert name in out


def test_one_command_makes_a_figure(figures, tmp_path):
    words = ("batch-sizes", "--data", "digits", "--epochs", "1", "--batch-sizes", "512", "--device", "cpu")
    code, out, err = figures(*words)
    assert (code, err) == (0, "")
    assert "Theirs, not ours" in out
    made = {path.name for path in (tmp_path / "runs" / "figures").glob("[!.]*")}
    assert made == {"batch-sizes.json", "batch-sizes.png", "batch-sizes.md"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a figure (curves, fisher-norm, split-dim, batch-sizes, bert) or all"),
        (("curve",), "there is no figure curve (did you mean curves?)"),
        (("curves", "--seeds", "one"), "--seeds one: must be whole numbers of at least 0"),
        (("curves", "--seeds", "1,1"), "--seeds 1,1: give different whole numbers of 0 or more"),
        (("curves", "--seeds", "-1"), "--seeds -1: must be whole numbers of at least 0, separated by commas"),
        (("batch-sizes", "--batch-sizes", "0,8"), "--batch-sizes 0,8: must be whole numbers of at least 1"),
        (("curves", "--epochs", "0"), "epochs=0 should be greater than or equal to 1"),
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
def test_bad_words_are_one_line(figures, words, said):
    assert_refused(figures(*words), said)


def test_a_file_is_no_folder(figures, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert_refused(figures("curves", "--out", taken), "is a file: choose another folder with --out")
    assert taken.read_text() == "mine"


def test_two_processes_do_not_measure_the_same_figure(figures, tmp_path):
    (tmp_path / "out").mkdir()
    lock = tmp_path / "out" / ".curves.lock"
    with FileLock(lock):
        lock.write_text(f"process {os.getpid()} on this machine\n")
        refused = figures("curves", "--data", "digits", "--out", "out")
    assert_refused(refused, f"torch-thor: figure curves in out is in use by process {os.getpid()} on ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".curves.lock"]
