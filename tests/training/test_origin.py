"""What a run was begun from: edits of its file are applied or refused, and another file of the same
name never continues it.
"""

import json
from pathlib import Path

import pytest

from command_line import assert_refused, call, contents
from torch_thor.training.folder import RunFolder
from torch_thor.training.origin import read_origin, store_origin, stored_origin

KEYS = {
    "data": {"name": "digits"},
    "model": "small-cnn",
    "optimizer": ["sgd"],
    "threads": 1,
    "steps": 2,
    "optimizers": {"sgd": {"lr": 0.1}},
}


def write(path, **more):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**KEYS, **more}))


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return lambda *words: call(monkeypatch, capsys, "train", *words)


def stored(place="run"):
    return RunFolder(Path(place)).stored()


def test_a_free_key_that_was_edited_is_applied_and_named(tmp_path, train):
    file = tmp_path / "mine.yaml"
    write(file, steps=None, epochs=1, log_interval=50)
    assert train("mine.yaml", "--out", "run", "batch_size=700", "log_interval=7")[0] == 0
    write(file, steps=None, epochs=2, log_interval=50)
    code, out, err = train("mine.yaml", "--resume", "--out", "run")
    assert code == 0, err
    assert "the run in run continues with epochs: 1 -> 2" in out
    assert "log_interval" not in out  # the word of the run counts, because the file is as it was
    recipe = stored()
    assert (recipe.epochs, recipe.batch_size, recipe.log_interval) == (2, 700, 7)
    # what was applied is not said again, and a word counts more than the file
    write(file, steps=None, epochs=3, log_interval=50)
    code, out, err = train("mine.yaml", "--resume", "--out", "run", "epochs=4")
    assert code == 0, err
    assert "continues with epochs: 2 -> 4" in out
    code, out, _ = train("mine.yaml", "--resume", "--out", "run")
    assert code == 0
    assert "continues with" not in out


def test_every_other_key_that_was_edited_is_refused_by_name(tmp_path, train):
    file = tmp_path / "mine.yaml"
    write(file)
    assert train("mine.yaml", "--out", "run")[0] == 0
    before = contents(tmp_path / "run")
    write(file, optimizers={"sgd": {"lr": 0.001, "momentum": 0.5}}, seed=3)
    result = train("mine.yaml", "--resume", "--out", "run")
    assert_refused(
        result,
        "optimizers.sgd.lr: 0.1 -> 0.001",
        "optimizers.sgd.momentum: None -> 0.5",
        "seed: 0 -> 3",
        "resume without changing them",
    )
    write(file, optimizers={})  # a key that is no longer there has its default
    assert_refused(train("mine.yaml", "--resume", "--out", "run"), "optimizers.sgd.lr: 0.1 -> None")
    write(file, stpes=3)
    assert_refused(train("mine.yaml", "--resume", "--out", "run"), "did you mean steps?")
    assert contents(tmp_path / "run") == before
    # without its name the file is not read
    assert train("--resume", "--out", "run")[0] == 0


def test_a_file_never_continues_or_deletes_the_run_of_another(tmp_path, train):
    write(tmp_path / "a/net.yaml", batch_size=128)
    write(tmp_path / "b/net.yaml", batch_size=64)
    write(tmp_path / "c/net.yaml", batch_size=32)
    assert train("a/net.yaml")[0] == train("b/net.yaml")[0] == 0
    sizes = [stored(f"runs/{name}").batch_size for name in ("net", "net-2")]
    assert sizes == [128, 64]
    code, out, err = train("a/net.yaml", "--resume", "log_interval=1")
    assert code == 0, err
    assert "are in runs/net\n" in out
    before = contents(tmp_path / "runs")
    assert_refused(
        train("c/net.yaml", "--resume"),
        "no run in runs/net, runs/net-2 was begun with",
        "c/net.yaml: leave --resume out to start one, or name the folder of the run with --out",
    )
    assert_refused(
        train("a/net.yaml", "--resume", "--out", "runs/net-2"),
        "runs/net-2 was begun with",
        "b/net.yaml, and",
        "(batch_size: 64 -> 128): name that one or none",
    )
    assert contents(tmp_path / "runs") == before
    code, out, err = train("a/net.yaml", "--overwrite", "steps=1")
    assert code == 0, err
    assert [stored(f"runs/{name}").steps for name in ("net", "net-2")] == [1, 2]
    assert train("c/net.yaml", "--overwrite")[0] == 0
    assert stored("runs/net-3").batch_size == 32


def test_a_project_that_was_moved_finds_its_runs(tmp_path, train, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(tmp_path / "here/sub/net.yaml")
    assert train("sub/net.yaml")[0] == 0
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert train("sub/net.yaml", "--resume")[0] == 0


def test_an_origin_is_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a/net.yaml")
    for name, place in (("digits", "digits"), ("a/net.yaml", str(tmp_path / "a/net.yaml"))):
        origin = read_origin(name)
        store_origin(origin, tmp_path)
        found = stored_origin(tmp_path)
        assert (found.name, found.keys) == (place, origin.keys)
        assert found.is_same(origin)
    assert not found.is_same(read_origin("digits"))
    (tmp_path / ".origin").write_text("[1")
    assert stored_origin(tmp_path) is None
