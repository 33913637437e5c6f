"""LAMB, AGCSGD and the clipping under FSDP2: two processes with uneven shards take the steps of one."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.pytorch_utils import Conv1D

import warm
from torch_thor import AGCSGD, LAMB, adaptive_clip_grad_


def make_optimizers(model):
    return {
        "agc-sgd": lambda: AGCSGD(model, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip_factor=0.02),
        "agc-sgd, one at a time": lambda: AGCSGD(model, lr=0.1, momentum=0.9, clip_factor=0.02, foreach=False),
        "lamb": lambda: LAMB(model, lr=0.05),
        "lamb, one at a time": lambda: LAMB(model, lr=0.05, foreach=False),
        "clipped sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
    }


def compare(model, name, mesh):
    """Rows and units are not the same on both ranks; some layers have the inputs first."""
    twin = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    optimizer, other = make_optimizers(model)[name](), make_optimizers(twin)[name]()
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()
        counts = []
        for one, its_optimizer in ((model, optimizer), (twin, other)):
            one(x).square().mean().backward()
            if name == "clipped sgd":
                counts.append(adaptive_clip_grad_(one, 0.02))
            its_optimizer.step()
            its_optimizer.zero_grad()
            if name.startswith("agc"):
                counts.append(its_optimizer.clip_statistics)
        assert len({(int(clipped), units) for clipped, units in counts}) <= 1, counts
        assert all(0 < clipped < units for clipped, units in counts)
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-12, atol=1e-15, msg=lambda m, key=key: f"{key}: {m}")


def worker(rank, store):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2,))
    for name in make_optimizers(None):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), Conv1D(6, 7), nn.Tanh(), nn.Unflatten(1, (3, 2)), nn.ConvTranspose1d(3, 4, 1),
            nn.ConvTranspose1d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(18, 3),
        ).double()  # fmt: skip
        compare(model, name, mesh)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
    start_method = warm.context().get_start_method()
    # raises what a worker raises
    torch.multiprocessing.start_processes(worker, (str(tmp_path / "store"),), nprocs=2, start_method=start_method)
