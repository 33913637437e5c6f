"""Several processes, with batches of different sizes, train as one process does."""

import noisy
import pytest
import torch
from torch import nn

from torch_thor.errors import UserError
from torch_thor.training.parallel import Ranks, blocks, divide


def train(rank, world, folder, given, name):
    return noisy.go(
        folder, noisy.recipe(**given), name, Ranks(rank, world), task=noisy.Noisy(noisy.Quiet)
    )


WAYS = [
    (2, {}),
    pytest.param(4, {}, marks=pytest.mark.slow),
    (2, {"parallel": "fsdp"}),
    pytest.param(4, {"parallel": "hsdp", "shards": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "way"), WAYS)
@pytest.mark.parametrize("name", ["thor", pytest.param("sgd", marks=pytest.mark.slow)])
def test_equals_one_process(pool, tmp_path, world, way, name):
    thor = {**noisy.SETTINGS, "split_dim": 1, "max_update_ratio": None}
    for more in ({}, {"accumulation": 2, "clip_norm": 0.5}):
        given = {"optimizers": {"thor": thor, "sgd": {"lr": 0.05}}, **more}
        seen, (weights, _) = train(0, 1, tmp_path / "one", given, name)
        found = pool.run(world, tmp_path, train, tmp_path / "many", {**given, **way}, name)
        # all processes have the same losses and metrics, to the last bit
        assert all(other[0] == found[0][0] for other in found)
        torch.testing.assert_close(found[0][0], seen)
        torch.testing.assert_close(found[0][1][0], weights)
        # only the first process has the whole weights
        assert not any(other[1][0]["model.safetensors"] for other in found[1:])


def test_groups_that_do_not_fit_are_refused():
    said = "cannot divide 4 processes into groups of shards=3: shards must be 2 or more"
    with pytest.raises(UserError, match=said):
        divide([noisy.Net()], noisy.recipe(parallel="hsdp", shards=3), Ranks(0, 4))


def names(model):
    by_module = {module: name for name, module in model.named_modules()}
    return sorted(by_module[block] for block in blocks(model))


def test_blocks_are_the_elements_of_lists_that_share_nothing_with_the_rest():
    def line():
        return nn.Linear(2, 2)

    lists = nn.ModuleList([line(), nn.Sequential(line(), nn.ReLU())])
    assert names(nn.ModuleDict({"a": lists, "rest": line()})) == ["a.0", "a.1.0", "rest"]
    assert names(noisy.Net()) == ["body.0", "body.1", "lists.0", "lists.1"]
    model = nn.Sequential(line(), line(), line())
    model[2].weight = model[0].weight
    assert names(model) == ["1"]
