"""Raw data of figures: they come back as they were, whole or not at all, and nothing else is taken for them."""

import json
from pathlib import Path

import pytest

from torch_thor.bench import key_of
from torch_thor.bench.figures import RawData, read
from torch_thor.bench.figures.raw import RawFile, differences, plain
from torch_thor.training import UserError


def raw_data():
    runs = [{"job": {"setting": name, "seed": seed}, "loss": [2.5, 0.125]} for seed in (0, 1) for name in "ab"]
    return RawData("curves", {"recipe": {"lr": 0.05}, "seeds": [0, 1]}, {"torch": "2.15.0"}, runs)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "curves.json"
    raw_data().write(path)
    return path


def test_comes_back_as_it_was(path):
    assert read(path, "curves") == raw_data()
    assert sum('"job"' in line for line in path.read_text().splitlines()) == 4  # a line a run


def test_nothing_there_is_none(tmp_path):
    assert read(tmp_path / "curves.json", "curves") is None


def test_plain_is_what_json_gives_back():
    values = plain({"seeds": (0, 1), "loss": [0.123456789, 1234567.0, 3], "last": None, "refresh": True})
    assert values == {"seeds": [0, 1], "loss": [0.123457, 1234570.0, 3], "last": None, "refresh": True}
    assert plain(values) == values
    assert isinstance(values["loss"][2], int)


def test_runs_are_found_by_their_jobs():
    raw = raw_data()
    assert raw.run(setting="b", seed=1) is raw.runs[3]
    assert raw.run(setting="b") is None
    assert raw.chosen(setting="a") == [raw.runs[0], raw.runs[2]]


def test_the_file_is_the_store_of_its_runs(path):
    raw = raw_data()
    store, run = RawFile(raw, path), {"job": {"setting": "c", "seed": 0}, "loss": []}
    key = key_of(run["job"])
    assert (key, store.holds(key)) == ("seed 0, setting c", False)
    assert all(store.holds(key_of(there["job"])) for there in raw.runs)
    drawn = [path.with_suffix(ending) for ending in (".png", ".md")]
    for other in drawn:
        other.write_text("of the runs before")
    store.keep(key, run)
    assert store.holds(key)
    assert read(path, "curves").runs == [*raw_data().runs, run]
    assert not any(other.exists() for other in drawn)
    assert store.folder == path.parent


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: text.replace("0.125", "0.126"), "is damaged"),
        (lambda text: text.replace('"curves"', '"fisher-norm"'), "is damaged"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "does not hold raw data of a figure in format 1"),
        (lambda text: "[1, 2]", "does not hold raw data of a figure in format 1"),
        (lambda text: "{}", "does not hold raw data of a figure in format 1"),
        (lambda text: '{"format": 1}', "is damaged"),
    ],
    ids=["cut_short", "number_changed", "name_changed", "other_format", "list", "empty", "bare"],
)
def test_damaged_files_are_named(path, change, said):
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=said) as raised:
        read(path, "curves")
    assert "--overwrite" in str(raised.value)


def test_another_figures_data_are_refused(path):
    with pytest.raises(UserError, match="holds figure curves, not batch-sizes"):
        read(path, "batch-sizes")


def test_a_write_that_fails_leaves_the_file_that_was_there(path, monkeypatch):
    before = path.read_bytes()
    longer = raw_data()
    longer.runs.append({"job": {"setting": "a", "seed": 2}, "loss": []})

    def full(self, text, encoding):
        self.write_bytes(text.encode()[:50])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"cannot be written.*No space left"):
        longer.write(path)
    assert path.read_bytes() == before
    assert json.loads(before)["format"] == 1


def test_differences_name_the_keys():
    old, new = {"recipe": {"lr": 0.1, "epochs": 2}, "seeds": [0]}, {"recipe": {"lr": 0.1, "epochs": 3}, "rule": "root"}
    assert differences(old, new) == "recipe.epochs: 2 -> 3; seeds: [0] -> None; rule: None -> root"
    assert differences(old, old) == ""
    many = {str(i): i for i in range(9)}
    assert differences({}, many).endswith("; and 3 more")
