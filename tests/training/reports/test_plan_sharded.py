"""What the first process stores and sends under FSDP2, against a training with `fully_shard`."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_thor import THOR, ThorMuon
from torch_thor.training.reports.plan_sharded import (
    blocks_of,
    collectives_of_refresh,
    shard_layers,
    sharded_parameter_bytes,
    sharded_share,
    stored_bytes,
)


class Kinds(nn.Module):
    """A convolution, a grouped one, an embedding, rows of one weight, and a layer with fewer rows than processes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.grouped = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.words = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, images, words):
        x = self.grouped(self.conv(images)).flatten(2).transpose(1, 2) + self.words(words)
        return self.last(self.attention(x, x, x, need_weights=False)[0])


@pytest.fixture
def fake():
    """Starts a process group in which this process is alone with the others only pretended."""

    def start(world):
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        return init_device_mesh("cpu", (world,))

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4, 5])
@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
@pytest.mark.filterwarnings("ignore:.*preconditions")
def test_blocks_and_bytes_are_those_of_fully_shard(fake, world, optimizer):
    model = Kinds()
    layers = shard_layers(optimizer(model, split_dim=4).curvature.values(), world)
    whole = sum(p.nbytes for p in model.parameters())
    share = sharded_share(model, layers, whole, world)
    real = Kinds()
    fully_shard(real, mesh=fake(world))
    found = list(optimizer(real, split_dim=4).curvature.values())
    assert [layer.name for layer in layers] == [layer.name for layer in found]
    assert blocks_of(layers) == blocks_of(found)
    assert collectives_of_refresh(layers, world) == collectives_of_refresh(found, world)
    assert share.sent == sum(one.sent(world) for one in collectives_of_refresh(found, world))
    assert share.parameter_bytes == sum(p.to_local().nbytes for p in real.parameters())
    for layer in found:
        layer.weight_view.bind({}, layer.weight_view.options, layer.weight, layer.weight_view.shards)
        layer.bind()
        for factor in layer.stored:
            factor.make_zeros(torch.float32, torch.device("cpu"))
    tensors = {}  # layers that are rows of one weight share the factor of these rows
    for layer in found:
        for key, value in layer.weight_view.state.items():
            tensors[id(layer.weight), key] = getattr(value, "to_local", lambda value=value: value)().nbytes
    assert share.state_bytes == sum(tensors.values())


def test_memory_on_one_process_and_on_many():
    model = nn.Linear(8, 8, bias=False)
    layers = list(THOR(model, split_dim=4).curvature.values())
    alone = shard_layers(layers, 1)
    assert stored_bytes(alone, 1) == 4 * 2 * 2 * 32  # A and G of two blocks of 4, with inverses
    assert sharded_share(model, alone, 256, 1).sent == 0
    many = shard_layers(layers, 4)
    assert stored_bytes(many, 4) == 4 * 2 * (32 + 8)
    assert sharded_parameter_bytes(model, 4) == 64
    share = sharded_share(model, many, 256, 4)
    assert share.memory == 3 * 64 + stored_bytes(many, 4)
    assert share.weights_sent == 3 * 192
