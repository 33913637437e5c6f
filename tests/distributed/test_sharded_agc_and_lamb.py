"""LAMB, AGCSGD and the clipping take the steps of one process under FSDP2."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.pytorch_utils import Conv1D

from torch_thor import AGCSGD, LAMB, adaptive_clip_grad_

CLIPPED = {"lr": 0.1, "clip_factor": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
OPTIMIZERS = {
    "agc-sgd": lambda model: AGCSGD(model, **CLIPPED),
    "agc-sgd, no foreach": lambda model: AGCSGD(model, foreach=False, **CLIPPED),
    "lamb": lambda model: LAMB(model, lr=0.05),
    "lamb, no foreach": lambda model: LAMB(model, lr=0.05, foreach=False),
    "clipped sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def compare(rank, world):
    """Rows and units are not the same on both ranks; some layers have the inputs first."""
    mesh = init_device_mesh("cpu", (world,))
    for name, make in OPTIMIZERS.items():
        model = nn.Sequential(
            nn.Linear(5, 7), nn.Tanh(), Conv1D(6, 7), nn.Tanh(), nn.Unflatten(1, (3, 2)),
            nn.ConvTranspose1d(3, 4, 1),
            nn.ConvTranspose1d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(18, 3),
        ).double()  # fmt: skip
        twin = copy.deepcopy(model)
        fully_shard(model, mesh=mesh)
        both = [(net, make(net)) for net in (model, twin)]
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()
            counts = []
            for net, optimizer in both:
                net(x).square().mean().backward()
                found = adaptive_clip_grad_(net, 0.02) if name == "clipped sgd" else None
                optimizer.step()
                optimizer.zero_grad()
                found = optimizer.clip_statistics if name.startswith("agc") else found
                counts.append(None if found is None else (int(found.clipped), found.units))
            assert counts[0] == counts[1], name
            assert counts[0] is None or 0 < counts[0][0] < counts[0][1], name
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-12, atol=1e-15, msg=name)


def test_two_processes_take_the_steps_of_one(run):
    run(2, compare)
