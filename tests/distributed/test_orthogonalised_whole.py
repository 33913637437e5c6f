"""With `whole_matrices=True` the scale-free step under FSDP2 is that of one process, whose matrices nobody divides."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from joined import OPTIONS, mean_loss, share, stream
from sharded import mesh_of, whole_weights
from torch_thor import THOR, Distributed

SPECTRAL = {**OPTIONS, "scaling": "spectral", "lr": 0.05, "damping": 0.1, "trace_thresholds": (0.0, 0.0)}


class Free(nn.Module):
    """A matrix without a kind, experts whose matrices are numbered, and a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 2)
        self.free = nn.Parameter(torch.randn(9, 7) / 3)
        self.numbered = nn.Parameter(torch.randn(3, 7, 4) / 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.tokens = nn.Embedding(11, 8)
        self.rows = nn.Linear(80, 9)
        self.tall = nn.Linear(4, 13)
        self.head = nn.Linear(13, 5)

    def forward(self, batch):
        pixels, words = batch
        x = self.tokens(words)
        x = self.attention(x, x, x, need_weights=False)[0].mean(1)
        x = self.rows(torch.cat([torch.tanh(self.conv(pixels)).flatten(1)[:, :72], x], dim=1)) @ self.free
        x = torch.einsum("bi,eij->bj", torch.tanh(x), self.numbered)
        return self.head(torch.tanh(self.tall(x)))


def free():
    torch.manual_seed(0)
    return Free().double()


def both(rank, world, shape, options):
    options = {**SPECTRAL, **options}
    twin, model = free(), fully_shard(free(), mesh=mesh_of(shape))
    optimizer = THOR(model, **options, distributed=Distributed(whole_matrices=True))
    its_optimizer = THOR(twin, **options, distributed=Distributed(process_group=False))
    sent = []
    for batch in stream(7):
        inputs, labels = share(batch, rank, world)
        mean_loss(model(inputs), labels).backward()
        mean_loss(twin(batch[0]), batch[1]).backward()
        with CommDebugMode() as counted:
            optimizer.step()
        its_optimizer.step()
        if not optimizer.last_refresh:
            sent.append(counted.get_total_counts())
        optimizer.zero_grad()
        its_optimizer.zero_grad()
    ours = whole_weights(model)
    for name, theirs in twin.named_parameters():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-4, atol=1e-6, msg=lambda m, at=name: f"{at}: {m}")
    return sent


@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param((1,), {"split_dim": 4}, id="blocks-fsdp-1"),
        pytest.param((4,), {"split_dim": 4}, id="blocks-fsdp-4"),
        pytest.param((2, 2), {"split_dim": 4, "weight_decay": 0.1, "skip": "attention.k_proj"}, id="decay-hsdp"),
        pytest.param((2,), {"split_dim": None, "nesterov": False}, id="whole-fsdp-2"),
    ],
)
def test_equals_one_process(run, mesh, options):
    """Rows that the shards do not divide evenly, shards without rows, tall and wide matrices, fused weights."""
    world = torch.Size(mesh).numel()
    for sent in run(world, both, mesh, options):
        assert sent
        # there and back, and the norms of the weights; all agree first
        assert set(sent) == {3 + (world > 1)}
