"""Several processes, with batches of different sizes, train as one does."""

import noisy
import pytest
import torch
from torch import nn

from torch_thor.errors import UserError
from torch_thor.training.parallel import Ranks, blocks, device_of, divide


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
    settings = {
        "thor": {**noisy.SETTINGS, "split_dim": 1, "max_update_ratio": None},
        "sgd": {"lr": 0.05},
    }
    for more in ({}, {"accumulation": 2, "clip_norm": 0.5}):
        given = {"optimizers": settings, **more}
        seen, (weights, _) = train(0, 1, tmp_path / "one", given, name)
        found = pool.run(world, tmp_path, train, tmp_path / "many", {**given, **way}, name)
        # all know the losses and metrics, to the last bit
        assert all(other[0] == found[0][0] for other in found)
        torch.testing.assert_close(found[0][0], seen)
        torch.testing.assert_close(found[0][1][0], weights)
        # whole on the first process only
        assert not any(other[1][0]["model.safetensors"] for other in found[1:])


def exchange(rank, world):
    ranks = Ranks(rank, world)
    return ranks.total([rank, 0.5]), ranks.gathered({"rank": rank}), ranks.broadcast(f"by {rank}")


def test_what_processes_tell_each_other(pool, tmp_path):
    wanted = [6.0, 2.0], [{"rank": other} for other in range(4)], "by 0"
    assert pool.run(4, tmp_path, exchange) == [wanted] * 4


@pytest.mark.parametrize("given", [{"shards": 3}, {}])
def test_groups_that_do_not_fit_are_refused(monkeypatch, given):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    said = (
        f"cannot divide 4 processes into groups of shards={given.get('shards', 1)}: shards must be "
        "2 or more and divide"
    )
    with pytest.raises(UserError, match=said):
        divide([noisy.Net()], noisy.recipe(parallel="hsdp", **given), Ranks(0, 4))


def names(model):
    by_module = {module: name for name, module in model.named_modules()}
    return sorted(by_module[block] for block in blocks(model))


def test_blocks_are_the_elements_of_lists_that_share_nothing_with_the_rest():
    lists = nn.ModuleDict(
        {"a": nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())])}
    )
    assert names(nn.ModuleDict({"lists": lists, "rest": nn.Linear(2, 2)})) == [
        "lists.a.0",
        "lists.a.1.0",
        "rest",
    ]
    assert names(noisy.Net()) == ["body.0", "body.1", "lists.0", "lists.1"]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert names(model) == ["1"]
    assert names(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2,
    enable_nested_tensor=False)) == [
        "layers.0", "layers.1",
    ]  # fmt: skip


def test_devices():
    assert device_of("cpu") == torch.device("cpu")
    for name in ("cuda:99", "abacus", "hpu"):
        with pytest.raises(
            UserError, match=f"device={name} cannot be used .*: try device=cpu or device=auto"
        ):
            device_of(name)
