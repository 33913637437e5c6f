"""What a process keeps and sends, against a training whose other processes are only pretended.

tests/distributed/test_traffic.py compares what refreshes send with what real ranks send.
"""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_thor import THOR, ThorMuon
from torch_thor.tools.traffic import (
    GATHER,
    SCATTER,
    Collective,
    blocks_of,
    collectives_of_refresh,
    collectives_of_training,
    laid_out,
    memory_of,
)
from torch_thor.training.parallel import blocks

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")
NAMES = {name: name for name in (GATHER, SCATTER, "all_reduce")}
MESHES = [(5,), (3, 2)]
pytestmark = pytest.mark.filterwarnings("ignore:.*preconditions")


class Kinds(nn.Module):
    """Among others a layer with fewer rows than processes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.grouped = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.words = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.last[0].bias.requires_grad_(False)

    def forward(self, images, words):
        x = self.grouped(self.conv(images)).flatten(2).transpose(1, 2) + self.words(words)
        return self.last(self.attention(x, x, x, need_weights=False)[0])

    def loss(self):
        return self(torch.randn(2, 2, 3, 3), torch.randint(11, (2, 9))).square().mean()


@pytest.fixture
def fake():
    """Starts a process group whose other processes are only pretended."""

    def start(*mesh):
        world = torch.Size(mesh).numel()
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        return init_device_mesh("cpu", mesh, mesh_dim_names=("copies", "shards")[-len(mesh) :])

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def recorded():
    """The collectives that start inside of the block."""
    found = []

    def recording(name, really):
        def collective(*given, **options):
            every = [*given, *options.values()]
            (group,) = [value for value in every if isinstance(value, dist.ProcessGroup)]
            size = max(value.nbytes for value in every if torch.is_tensor(value))
            found.append(Collective(name, group.size(), size))
            return really(*given, **options)

        return collective

    with contextlib.ExitStack() as stack:
        # names that FSDP2 uses before and since torch 2.14
        since = {"all_gather_single": GATHER, "reduce_scatter_single": SCATTER}
        for called, name in {**since, **NAMES}.items():
            if hasattr(dist, called):
                really = recording(name, getattr(dist, called))
                stack.enter_context(mock.patch.object(dist, called, really))
        yield found


def sharded(mesh):
    model = Kinds()
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", [THOR, ThorMuon])
def test_what_the_first_process_keeps_and_sends_is_that_of_fully_shard(fake, mesh, kind):
    world, shards = torch.Size(mesh).numel(), mesh[-1]
    planned, real = kind(Kinds(), split_dim=4), kind(sharded(fake(*mesh)), split_dim=4)
    found = list(real.curvature.values())
    layers = laid_out(planned.curvature.values(), world, shards=shards)
    assert [layer.name for layer in layers] == [layer.name for layer in found]
    assert blocks_of(layers) == blocks_of(found)
    refresh = collectives_of_refresh(layers, world)
    assert refresh == collectives_of_refresh(found, world)
    memory = memory_of(planned, layers, shards)
    real._complete(real._binding())

    def local(tensors):
        tensors = [tensor for tensor in tensors if torch.is_tensor(tensor)]
        shards = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum(shard.nbytes for shard in shards)

    states = [state.items() for state in real.state.values()]
    entries = [(key, value) for state in states for key, value in state if key != "step"]
    assert memory["curvature"] == local(value for key, value in entries if key not in MOMENTS)
    gradients = [p for p in real.model.parameters() if p.requires_grad]
    held = [*real.model.parameters(), *real.model.buffers(), *gradients]
    assert memory["memory"] == local([*held, *(value for _, value in entries)])


@pytest.mark.parametrize("mesh", MESHES)
def test_bytes_of_a_step_are_those_of_fully_shard(fake, mesh):
    model = sharded(fake(*mesh))
    model.loss().backward()  # the first pass finds out the order of the parts
    with recorded() as found:
        model.loss().backward()
    planned = collectives_of_training(Kinds(), torch.Size(mesh).numel(), mesh[-1])
    assert Counter(found) == Counter(planned)


def test_bytes_of_a_step_are_those_of_ddp(fake):
    fake(4)
    sizes = []
    model = DistributedDataParallel(Kinds())

    def hook(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(torch.randn(2, 2, 3, 3), torch.randint(11, (2, 9))).square().mean().backward()
    (planned,) = collectives_of_training(Kinds(), 4)
    assert planned == Collective("all_reduce", 4, sum(sizes))
    assert collectives_of_training(Kinds(), 1) == []


@pytest.mark.parametrize("kind", [THOR, ThorMuon])
def test_one_process_keeps_what_a_step_leaves(kind):
    optimizer = kind(Kinds(), split_dim=4)
    layers = laid_out(optimizer.curvature.values(), 1)
    memory = memory_of(optimizer, layers)
    optimizer.model.loss().backward()
    gathered = [layer.statistics.sums() for layer in optimizer.curvature.values()]
    assert memory["sums"] == sum(sums.rows.nbytes for layer in gathered for sums in layer)
    optimizer.step()
    states = [state.items() for state in optimizer.state.values()]
    sizes = {True: 0, False: 0}
    for key, value in (entry for state in states for entry in state):
        if torch.is_tensor(value) and key != "step":
            sizes[key in MOMENTS] += value.nbytes
    assert memory["curvature"] == sizes[False]
    trained = [p for p in optimizer.model.parameters() if p.requires_grad]
    tensors = [*optimizer.model.parameters(), *optimizer.model.buffers(), *trained]
    assert memory["memory"] == sum(tensor.nbytes for tensor in tensors) + sum(sizes.values())
