"""Shared by all tests: one thread (two cores are shared by many processes), a fixed seed, and the command line."""

import functools

import hypothesis
import pytest
import torch

from command_line import call

torch.set_num_threads(1)
hypothesis.settings.register_profile("torch_thor", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("torch_thor")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Call the command line in an empty folder: `run(*words)` gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(call, monkeypatch, capsys)
