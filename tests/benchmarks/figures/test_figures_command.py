"""`python -m benchmarks figures` as typed: measured once, gone on with after a kill, drawn again,
refused in one line.
"""

import functools
import json

import pytest

import forking
from command_line import assert_refused, descendants, end, finish, start, wait_for

NAMES = ["momentum", "thor", "thor_stop", "thor_nt", "thor, unbounded", "thor_nt, growing interval"]
WORDS = ("curves", "--data", "digits", "--epochs", "1", "--device", "cpu")
refused = functools.partial(assert_refused, by="benchmarks")


@pytest.fixture
def figures(bench):
    """Call `python -m benchmarks figures` in an empty folder."""
    return functools.partial(bench, "figures")


@pytest.mark.slow
def test_measured_once_and_gone_on_with_after_a_kill(figures, tmp_path):
    folder = tmp_path / "runs" / "figures"
    store = folder / "curves.jsonl"
    killed = start(tmp_path, "figures", *WORDS, script=forking.__file__)
    wait_for(killed, store.exists, "first result")
    for pid in (killed.pid, *descendants(killed.pid)):
        end(pid)
    finish(killed)
    (folder / "curves.png").write_bytes(b"of other data")
    begun = store.read_text().splitlines()
    assert 1 <= len(begun) < len(NAMES)
    code, out, err = figures(*WORDS)
    assert (code, err) == (0, "")
    assert f"{len(NAMES) - len(begun)} of 6 results to measure" in out
    lines = store.read_text().splitlines()
    assert lines[: len(begun)] == begun  # also their times
    rows = [json.loads(line) for line in lines]
    assert [row["job"]["setting"] for row in rows] == NAMES
    for row in rows:
        assert (row["steps"], row["steps_per_epoch"], row["threads"]) == (22, 22, 1)
        assert row["command"] == "python -m benchmarks figures curves"
        assert row["job"]["recipe"]["data"]["name"] == "digits"
        assert f"| {row['job']['setting']} | {row['value']:.4f} | " in out
    own = {row["job"]["setting"]: row for row in rows}
    keys = ("trace_thresholds", "max_update_ratio", "kl_clip", "lr", "damping")
    thor = {name: row["job"]["recipe"]["optimizers"].get("thor", {}) for name, row in own.items()}
    settings = {name: [values.get(key) for key in keys] for name, values in thor.items()}
    assert settings["thor, unbounded"] == [[0.01, 0.0], None, None, 0.02, 0.1]
    assert settings["thor_nt"] == ["thor_nt", 0.01, None, 0.02, 0.1]
    assert [
        own[name]["refresh_steps"] for name in ("momentum", "thor_nt", "thor_nt, growing interval")
    ] == [0, 2, 2]
    assert [own["thor_nt"][key] for key in ("refreshed", "due")] == [8, 8]  # four layers
    assert "117 (8 devices)" in out
    assert "Theirs, not ours" in out
    assert (folder / "curves.md").read_text() in out
    assert (folder / "curves.png").read_bytes() != b"of other data"

    (folder / "curves.png").unlink()
    assert "0 of 6 results to measure" in figures(*WORDS, "--redraw")[1]
    assert (folder / "curves.png").exists()
    refused(
        figures(*WORDS, "--redraw", "--seeds", "0,1"), "lacks 6 of 12 results for these options"
    )
    assert store.read_text().splitlines() == lines


@pytest.mark.slow
def test_a_job_that_fails_is_named_and_the_others_are_kept(figures, tmp_path):
    words = (
        "batch-sizes",
        "--data",
        "digits",
        "--epochs",
        "1",
        "--device",
        "cpu",
        "--batch-sizes",
        "512,2048",
    )
    said = (
        "setting thor_nt, batch_size 2048, seed 0: UserError: batch_size=2048 is larger than the "
        "training set"
    )
    refused(figures(*words), "2 jobs failed, which the same command runs again", said)
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/figures/batch-sizes.jsonl").read_text().splitlines()
    ]
    assert [(row["job"]["setting"], row["job"]["batch_size"]) for row in rows] == [
        ("momentum", 512),
        ("thor_nt", 512),
    ]


def test_without_a_name_they_are_listed(figures):
    code, out, _ = figures()
    assert code == 0
    for name in ("curves", "fisher-norm", "split-dim", "batch-sizes", "bert", "all"):
        assert name in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("curve",), "there is no figure curve (did you mean curves?)"),
        (
            ("curves", "--seeds", "one"),
            "argument --seeds: one: must be whole numbers of at least 0",
        ),
        (
            ("batch-sizes", "--batch-sizes", "0,8"),
            "argument --batch-sizes: 0,8: must be whole numbers of at least 1",
        ),
        (("curves", "--epochs", "0"), "epochs=0 should be greater than or equal to 1"),
        (("curves", "--data", "mnist"), "there is no recipe mnist"),
        (("curves", "--device", "abacus"), "device=abacus cannot be used"),
        (
            ("curves", "--redraw"),
            "curves.jsonl lacks 6 of 6 results for these options: leave out --redraw",
        ),
        (("all", "--pixels", "0"), "--pixels 0: give 1 or more"),
        (
            ("fisher-norm", "--model", "resnet18"),
            "--model means nothing to fisher-norm: it is for split-dim",
        ),
        (
            ("batch-sizes", "--data", "growing.yaml"),
            "cannot be scaled with the batch: give the recipe a number",
        ),
        (
            ("curves", "--out", "broken"),
            ": delete it to measure anew, or choose another folder with --out",
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_bad_words_are_one_line(figures, tmp_path, words, said):
    interval = "{kind: geometric, first: 2, last: 5, factor: 1.5}"
    recipe = f"{{data: {{name: digits}}, optimizers: {{thor: {{update_interval: {interval}}}}}}}"
    (tmp_path / "growing.yaml").write_text(recipe)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "curves.jsonl").write_text("no results\n")
    refused(figures(*words), said)
    assert {path.name for path in tmp_path.iterdir()} == {"growing.yaml", "broken"}


def test_one_process_measures(figures, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    refused(figures("curves"), "figures are measured by one process: leave out torchrun")
