"""`split_dim=auto` in a recipe: what trains is what trains with the measured number."""

from dataclasses import replace

import pytest
import torch

from fake_times import fake_times
from resuming import Noisy, go
from tiny import assert_same
from torch_thor.training import StoppedError, UserError, image_run, load_recipe, train
from torch_thor.training.data import DataBundle, DataSpec, load_data
from torch_thor.training.models import MODELS


@pytest.fixture(scope="module")
def data():
    full = load_data(DataSpec("digits"))
    return DataBundle(full.train_images[:200], full.train_labels[:200], full.test_images, full.test_labels, 10)


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.setitem(MODELS, "noisy", Noisy)
    return load_recipe("digits", ["model=noisy", "steps=8", "batch_size=32", "eval_interval=4"])


def with_split(recipe, name, split_dim):
    settings = replace(recipe.optimizers[name], split_dim=split_dim)
    return replace(recipe, optimizers={**recipe.optimizers, name: settings})


def crossing_near(size):
    return fake_times(lambda _, split_dims, **__: tuple(1e-3 if one <= size else 100.0 for one in split_dims))


@pytest.mark.parametrize("name", ["thor", "thor-muon"])
def test_trains_as_with_the_number_also_after_a_stop(tmp_path, recipe, data, name):
    with crossing_near(16):
        measured = image_run(with_split(recipe, name, "auto"), name, data)
        state = torch.get_rng_state()  # dropout draws from it
    number = measured.optimizer.param_groups[0]["split_dim"]
    assert number in (1, 16, 32)
    given = image_run(with_split(recipe, name, number), name, data)
    assert torch.equal(torch.get_rng_state(), state)
    train(given)
    torch.set_rng_state(state)
    train(measured)
    assert_same(measured.model.state_dict(), given.model.state_dict())
    with crossing_near(16), pytest.raises(StoppedError):
        go(tmp_path / "run", with_split(recipe, name, "auto"), name, data, stop_at=5)
    with crossing_near(128):  # on another machine
        resumed = go(tmp_path / "run", with_split(recipe, name, "auto"), name, data, resume=True)
    assert_same(resumed.model.state_dict(), given.model.state_dict())


def test_what_cannot_be_measured_is_one_error(recipe, data):
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with fake_times(exhausted), pytest.raises(UserError, match="split_dim=auto: out of memory; give a number"):
        image_run(with_split(recipe, "thor", "auto"), "thor", data)
    with pytest.raises(UserError, match=r"split_dim='automatic'.* must be"):
        image_run(with_split(recipe, "thor", "automatic"), "thor", data)
