"""The settings of the data in a recipe."""

from pathlib import Path

from torch_thor.training.data import DataSpec


def test_the_folder_is_the_root_or_the_cache_of_the_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert DataSpec().folder() == Path("/home/me/.cache/torch-thor")
    assert DataSpec(root="data").folder() == Path("data")
