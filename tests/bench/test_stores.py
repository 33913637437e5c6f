"""Results on the disk: whole or not there, and as JSON that every reader takes."""

import json
import math
from pathlib import Path

import pytest

from torch_thor.bench import Folder, Rows, key_of, write_json, write_tables
from torch_thor.bench.stores import finite
from torch_thor.training import UserError


def test_a_folder_holds_a_file_for_each_result(tmp_path):
    store = Folder(tmp_path / "deep" / "results")
    assert not store.holds("sgd-lr0.1")
    store.keep("sgd-lr0.1", {"loss": [0.1, 1e-7], "failure": None, "best": -math.inf})
    assert store.holds("sgd-lr0.1")
    assert store.read("sgd-lr0.1") == {"loss": [0.1, 1e-7], "failure": None, "best": -math.inf}
    assert store.file("sgd-lr0.1").read_text().count("\n") == 1
    assert [path.name for path in store.folder.iterdir()] == ["sgd-lr0.1.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    store = Folder(tmp_path)
    store.keep("run", {"old": 1})

    def full(self, text, encoding):
        self.write_bytes(text.encode()[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"run.json cannot be written.*the same command then goes on"):
        store.keep("run", {"new": 2})
    assert store.read("run") == {"old": 1}


def test_one_file_holds_a_line_for_each_result(tmp_path):
    path = tmp_path / "deep" / "trials.json"
    trials = [{"lr": 0.1, "task": name} for name in ("a", "b")]
    keys = [key_of(trial) for trial in trials]
    assert keys == ["lr 0.1, task a", "lr 0.1, task b"]
    assert key_of(dict(reversed(trials[0].items()))) == keys[0]
    for key, trial in zip(keys, trials, strict=True):
        store = Rows(path, "trial")
        assert not store.holds(key)
        store.keep(key, {"trial": trial, "loss": 1.5})
    store.keep(keys[0], {"trial": trials[0], "loss": 0.5})
    assert store.folder == path.parent
    found = Rows(path, "trial")
    assert found.rows == [{"trial": trials[0], "loss": 0.5}, {"trial": trials[1], "loss": 1.5}]
    assert found.find(keys[1]) == found.rows[1]
    assert path.read_text().splitlines()[1] == '{"trial": {"lr": 0.1, "task": "a"}, "loss": 0.5},'


def test_tables_lie_beside_the_raw_data(tmp_path):
    write_tables(tmp_path / "a", "| x |", {"lr": {0.1: [1.5, math.inf]}})
    assert (tmp_path / "a" / "table.md").read_text() == "| x |\n"
    text = (tmp_path / "a" / "table.json").read_text()
    assert json.loads(text) == {"lr": {"0.1": [1.5, None]}}
    assert text.startswith('{\n "lr"')
    write_tables(tmp_path / "b", "| x |")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["table.md"]


def test_what_is_not_finite_becomes_null(tmp_path):
    assert finite({"a": [math.inf, -math.inf, math.nan, 0.1], "b": (1, "Infinity")}) == {
        "a": [None, None, None, 0.1],
        "b": [1, "Infinity"],
    }
    write_json(tmp_path / "x.json", [1], indent=2)
    assert (tmp_path / "x.json").read_text() == "[\n  1\n]\n"
