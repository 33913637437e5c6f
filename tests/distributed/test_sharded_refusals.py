"""What is refused under sharding, and what is left out."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from joined import mesh_of
from torch_thor import THOR, ThorMuon


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def tensor_parallel():
    return parallelize_module(model(), mesh_of((2,)), {"0": ColwiseParallel()})


def flat():
    warnings.simplefilter("ignore")  # it wants a GPU
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"))


def refused(rank, world, make, match):
    with pytest.raises(ValueError, match=match):
        THOR(make())


def made_before(rank, world):
    optimizer = THOR(own := model())
    fully_shard(own, mesh=mesh_of((world,)))
    own(torch.randn(3, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' is in none.*fully_shard"):
        optimizer.step()


def test_what_is_refused(run):
    by_rows = r"parameter '0.weight' is a DTensor .*must be by rows, by fully_shard"
    run(2, refused, tensor_parallel, by_rows)
    run(2, refused, flat, r"module 'itself' is a FullyShardedDataParallel.*use its successor")
    run(2, made_before)


class Left(nn.Module):
    """Three layers; the weights of two of them are not rows of one matrix."""

    def __init__(self):
        super().__init__()
        self.grouped, self.transposed = nn.Conv2d(4, 4, 2, groups=2), nn.ConvTranspose2d(4, 4, 2)
        self.plain = nn.Conv2d(4, 4, 2)

    def forward(self, x):
        return self.plain(self.transposed(self.grouped(x))).flatten(1)


def divided_later(rank, world, method):
    """Accelerate shards the model later, and puts the new parameters into the groups.

    The first step is taken without curvature, and the second step refreshes.
    """
    own = Left().double()
    optimizer = method(own, update_interval=2)
    fully_shard(own, mesh=mesh_of((world,)))
    optimizer.param_groups[0]["params"] = list(own.parameters())
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(rank)).double()
    for _ in range(3):
        optimizer.zero_grad()
        own(x).square().mean().backward()
        optimizer.step()
    reasons = {entry.name: entry.reason for entry in optimizer.coverage()}
    assert reasons["plain.weight"] is None
    assert "has 2 groups with factors of their own" in reasons["grouped.weight"]
    assert "which is no dimension of its matrix" in reasons["transposed.weight"]
    assert {*optimizer.curvature} == {"plain"}
    assert optimizer.curvature["plain"].refreshes > 0


@pytest.mark.filterwarnings("ignore:Thor|THOR")
@pytest.mark.parametrize("method", [THOR, ThorMuon])
def test_a_model_that_is_divided_after_the_optimizer_was_made(run, method):
    run(2, divided_later, method)
