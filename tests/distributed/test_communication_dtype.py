"""Blocks that are sent in bfloat16: equal bits on all ranks, and steps that differ by its rounding."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import OPTIONS, mean_loss, network, parallel, share, stream, train
from sharded import mesh_of, sharded, whole_weights
from torch_thor import THOR, Distributed

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a view")


def in_bfloat16(rank, world, mesh, options):
    options = {"trace_thresholds": (0.0, 0.0), **options}
    batches = [share(batch, rank, world) for batch in stream(6)]
    trained = []
    for dtype in (torch.bfloat16, None, torch.float32):
        more = {**options, "communication_dtype": dtype}
        model, optimizer = parallel(rank, world, **more) if mesh is None else sharded(mesh_of(mesh), **more)
        train(model, optimizer, batches)
        weights = dict(model.module.named_parameters()) if mesh is None else whole_weights(model)
        trained.append(torch.cat([weight.detach().flatten() for weight in weights.values()]))
    start = torch.cat([weight.detach().flatten() for weight in network().parameters()])
    bits = trained[0].tolist()
    errors = [float((one - trained[1]).norm() / (trained[1] - start).norm()) for one in (trained[0], trained[2])]
    return errors, tuple(bits)


@pytest.mark.parametrize("options", [{}, {"scaling": "spectral"}, {"divide_curvature": True}], ids=str)
@pytest.mark.parametrize(
    "mesh", [None, (2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=["ddp", "fsdp", "hsdp"]
)
def test_steps_differ_by_the_rounding_of_bfloat16(run, mesh, options):
    """Its relative rounding is 2⁻⁹; that of float32, 2⁻²⁴, beside factors of float64."""
    found = run(2 if mesh is None else torch.Size(mesh).numel(), in_bfloat16, mesh, options)
    assert len({bits for _, bits in found}) == 1, "the ranks differ in some bit"
    for (rounded, hardly), _ in found:
        assert 1e-6 < rounded < 0.2
        assert 0 < hardly < 1e-5


def different(rank, world):
    model = network()
    optimizer = THOR(model, **OPTIONS, distributed=Distributed(communication_dtype=torch.bfloat16 if rank else None))
    inputs, labels = share(next(stream(1)), rank, world)
    mean_loss(DDP(model)(inputs), labels).backward()
    with pytest.raises(RuntimeError, match=r"rank 1 has 'communication_dtype=torch.bfloat16'"):
        optimizer.step()


def test_ranks_must_send_the_same_dtype(run):
    run(2, different)


@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"communication_dtype must be None, torch.bfloat16 or torch.float32"):
        THOR(nn.Linear(3, 2), distributed=Distributed(communication_dtype=dtype))
