"""Shared by all tests: one thread, a fixed seed, the command line, ranks, pictures."""

import functools
import gc

import hypothesis
import pytest
import torch
from matplotlib.figure import Figure

from command_line import call
from ranks import Ranks
from warm import save_blank

torch.set_num_threads(1)
hypothesis.settings.register_profile("torch_thor", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("torch_thor")


def pytest_collection_finish():
    """What was imported stays: tests that collect garbage need not walk all of torch for it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def blank_pictures(request, monkeypatch):
    """Saved pictures are blank, unless a test is marked `pictures`: drawing takes long."""
    if "pictures" not in request.keywords:
        monkeypatch.setattr(Figure, "savefig", save_blank)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pool():
    """The processes of all tests that need several ranks."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Call the command line in an empty folder: `run(*words)` gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(call, monkeypatch, capsys)
