"""Where choices are kept, what they hold for, and that a damaged file is none."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_thor
from torch_thor import SplitChoice
from torch_thor.curvature import LayerCurvature, ParameterView
from torch_thor.curvature.kinds import kind_of
from torch_thor.split import cache

CHOICE = SplitChoice(16, 20.5, (1, 16), (1.0, 0.5), (0.0, 1.0), (0.1, 0.2), {"fc": {"A": (0.5, 0.0)}}, "a device")


def layers(inputs=20, outputs=3, name="fc", dtype=torch.float32):
    module = nn.Linear(inputs, outputs, dtype=dtype)
    return {name: LayerCurvature(name, kind_of(module), ParameterView(module, "weight"), [])}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_THOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_folder_follows_the_environment(monkeypatch, folder):
    assert cache.cache_folder() == folder
    monkeypatch.delenv("TORCH_THOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/torch-thor")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.cache_folder() == Path("/home/me/.cache/torch-thor")


def test_what_was_kept_is_found_and_readable(folder):
    assert cache.load(layers()) is None
    assert not folder.exists()
    cache.store(layers(), CHOICE)
    assert cache.load(layers()) == 16
    (file,) = folder.iterdir()
    stored = json.loads(file.read_text())
    assert stored["key"]["layers"] == [["fc", "Linear", 1, 20, 3]]
    assert stored["choice"]["crossing"] == 20.5


@pytest.mark.parametrize(
    "other", [{"inputs": 21}, {"outputs": 4}, {"name": "head"}, {"dtype": torch.float64}], ids=lambda o: next(iter(o))
)
def test_other_models_have_their_own(other):
    cache.store(layers(), CHOICE)
    assert cache.load(layers(**other)) is None
    assert cache.load(layers()) == 16


@pytest.mark.parametrize("what", ["device", "torch", "torch_thor"])
def test_other_devices_and_versions_have_their_own(monkeypatch, what):
    cache.store(layers(), CHOICE)
    if what == "device":
        monkeypatch.setattr(cache, "device_name", lambda device: "another")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        monkeypatch.setattr(torch_thor, "__version__", "9.9")
    assert cache.load(layers()) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', "STORED-KEY", "WRONG-VALUE"])
def test_a_damaged_file_is_no_choice(folder, text):
    cache.store(layers(), CHOICE)
    (file,) = folder.iterdir()
    stored = json.loads(file.read_text())
    if text == "STORED-KEY":  # the file of another key under this name
        text = json.dumps({**stored, "key": {}})
    elif text == "WRONG-VALUE":
        text = json.dumps({**stored, "choice": {"split_dim": True}})
    file.write_text(text)
    assert cache.load(layers()) is None


def test_a_write_that_fails_leaves_nothing(monkeypatch, folder):
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        cache.store(layers(), CHOICE)
    assert list(folder.iterdir()) == []
