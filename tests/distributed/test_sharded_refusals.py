"""What THOR refuses under sharding, with one sentence that names the value, the rule and the remedy."""

import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sharded import mesh_of
from torch_thor import THOR


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def tensor_parallel(world):
    return parallelize_module(model(), mesh_of((world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_parallel_and_fsdp(world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("shards", "tensor"))
    found = parallelize_module(model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(found, mesh=mesh["shards"])


def by_columns(world):
    return fully_shard(model(), mesh=mesh_of((world,)), shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)


def flat(world):
    warnings.simplefilter("ignore")  # it wants a GPU
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"))


MODELS = {
    tensor_parallel: r"parameter '0.weight' is a DTensor.*as by tensor parallelism.*leave the parameter to another",
    tensor_parallel_and_fsdp: r"parameter '0.weight' is a DTensor.*as by tensor parallelism; THOR supports FSDP2",
    by_columns: r"parameter '0.weight' is a DTensor.*THOR needs whole rows: Shard\(0\), the default of fully_shard",
    flat: r"module 'itself' is a FullyShardedDataParallel.*use its successor torch.distributed.fsdp.fully_shard",
}


def refused(rank, world, make, expected, options):
    with pytest.raises((ValueError, RuntimeError), match=expected):
        THOR(make(world), **options)


@pytest.mark.parametrize("make", MODELS)
def test_divisions_that_are_not_supported(run, make):
    run(2 if make is by_columns else 4, refused, make, f"(?s){MODELS[make]}", {})


def rows(world):
    return fully_shard(model(), mesh=mesh_of((world,)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"split_dim": "auto"}, 'split_dim="auto" measures whole factors.*give a number'),
        ({"process_group": False}, r"process_group=False: parameter '0.weight' is divided among the ranks \[0, 1\]"),
    ],
)
def test_options(run, options, expected):
    run(2, refused, rows, expected, options)


def of_another_group(rank, world):
    own = dist.new_group([rank], use_local_synchronization=True)
    optimizer = THOR(rows(world))
    with pytest.raises(ValueError, match=rf"divided among the ranks \[0, 1\], and THOR would .* ranks \[{rank}\]"):
        optimizer.process_group = own
    assert optimizer.process_group is None


def test_a_group_is_checked_when_it_is_set(run):
    run(2, of_another_group)


def made_before(rank, world):
    own = model()
    optimizer = THOR(own)
    fully_shard(own, mesh=mesh_of((world,)))
    own(torch.randn(3, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' is in none.*Make THOR after.*after fully_shard"):
        optimizer.step()


def test_thor_made_before_fully_shard(run):
    run(2, made_before)


class Left(nn.Module):
    """Layers whose weights are not rows of one matrix."""

    def __init__(self):
        super().__init__()
        self.grouped, self.transposed = nn.Conv2d(4, 4, 2, groups=2), nn.ConvTranspose2d(4, 4, 2)
        self.plain = nn.Conv2d(4, 4, 2)

    def forward(self, x):
        return self.plain(self.transposed(self.grouped(x)))


def coverage(rank, world):
    warnings.simplefilter("ignore")
    optimizer = THOR(fully_shard(Left(), mesh=mesh_of((world,))))
    return {entry.name: entry.reason for entry in optimizer.coverage()}


def test_layers_that_are_left_out_are_listed(run):
    for entries in run(2, coverage):
        assert [name for name, reason in entries.items() if reason is None] == ["plain.weight", "plain.bias"]
        assert "has 2 groups with factors of their own" in entries["grouped.weight"]
        assert "which is no dimension of its matrix" in entries["transposed.weight"]


class Mixed(Left):
    def forward(self, x):
        return super().forward(x).flatten(1)


def divided_later(rank, world, scaling):
    """Accelerate makes the optimizer first, then shards the model and puts the new parameters into its groups."""
    own = Mixed().double()
    optimizer = THOR(own, scaling=scaling, update_interval=2)
    before = [entry.reason for entry in optimizer.coverage()]
    fully_shard(own, mesh=mesh_of((world,)))
    optimizer.param_groups[0]["params"] = list(own.parameters())
    losses = []
    for step in range(8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(3, 4, 5, 5, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            loss = own(x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        assert any("divided among processes after THOR was made" in str(w.message) for w in caught) is (step == 0)
    assert losses[-1] < losses[0]
    expected = THOR(own, scaling=scaling)
    assert [entry.reason for entry in optimizer.coverage()] == [entry.reason for entry in expected.coverage()] != before
    return {name: layer.refreshes for name, layer in optimizer.curvature.items()}


@pytest.mark.parametrize("scaling", [None, "spectral"])
@pytest.mark.filterwarnings("ignore:THOR preconditions")
def test_a_model_that_is_divided_after_thor_was_made_is_inspected_again(run, scaling):
    """The first step is taken without curvature; the second one refreshes."""
    for refreshes in run(2, divided_later, scaling):
        assert set(refreshes) == {"plain"}
        assert refreshes["plain"] >= 1
