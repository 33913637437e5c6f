"""Checks of THOR and ThorMuon on a GPU, which fail where an error is not below its limit.

THOR is compared with the float64 reference of the tests, ThorMuon with the CPU, and training in one
process with NCCL under DDP and FSDP2 with training in none. A GPU computes polar factors by
products in bfloat16, which are compared with exact factors.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from benchmarks.runner.machine import DEVICE
from benchmarks.runner.markdown import table as markdown
from torch_thor import THOR, ThorMuon
from torch_thor.curvature import polar

OPTIONS: dict[str, Any] = {"lr": 0.02, "update_interval": 2}
THOR_OPTIONS: dict[str, Any] = {**OPTIONS, "damping": 0.3, "split_dim": 16}
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "THOR": partial(THOR, **THOR_OPTIONS),
    "ThorMuon": partial(ThorMuon, **OPTIONS),
}


def network(groups: int = 2) -> nn.Sequential:
    """Return a network with two convolutions, the second with groups, and a linear layer."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    second = nn.Conv2d(8, 8, 3, stride=2, groups=groups)
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(72, 5))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of four steps, on the CPU, in float64."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        images = torch.randn(6, 3, 8, 8, generator=generator).double()
        yield images, torch.randint(5, (6,), generator=generator)


def weights(model: nn.Module) -> Tensor:
    """Return all weights as one vector, on the CPU, in float64."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).cpu().double()


def trained(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    *,
    steps: int = 4,
    groups: int = 2,
) -> Tensor:
    """Return what an optimizer adds to the weights; it refreshes in every second step."""
    model = network(groups).to(device, dtype)
    start, wrapped = weights(model), wrap(model)
    optimizer = MAKERS[name](model)
    for (x, y), _ in zip(batches(), range(steps), strict=False):
        functional.cross_entropy(wrapped(x.to(device, dtype)), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model) - start


def error(found: Tensor, wanted: Tensor) -> float:
    """Return a relative error."""
    return float((found - wanted).norm() / wanted.norm())


# ---- checks --------------------------------------------------------------------------------------


def errors() -> Iterator[tuple[str, float, float]]:
    """Yield each check: what it compares, the error and its limit."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as in training scripts; factors ignore it
    for dtype, limit in ((torch.float64, 1e-7), (torch.float32, 0.02)):
        name = f"THOR, {str(dtype).removeprefix('torch.')}, against the reference"
        yield name, error(trained("THOR", DEVICE, dtype), by_the_reference()), limit
    # In bfloat16 the products also fill directions without a gradient, whose rounding errors they
    # take for singular values. These errors have no right value, so the rest of the step is tested
    # with products in the weights' own precision, and bfloat16 below, on matrices of full rank.
    wanted = trained("ThorMuon", torch.device("cpu"), torch.float64, steps=1)
    with mock.patch.object(polar, "_polar", in_own_precision):
        for dtype in (torch.float64, torch.float32):
            off = error(trained("ThorMuon", DEVICE, dtype, steps=1), wanted)
            yield f"ThorMuon, {dtype}, a step against the CPU", off, 0.02
    for width in (256, 512, 4608):
        matrices = torch.randn(4, 128, width, device=DEVICE)
        (found,), (exact,) = map(polar.orthogonalise, ([matrices], [matrices.double().cpu()]))
        off = error(found.double().cpu(), exact)
        yield f"polar factors, 128 x {width}, against the CPU", off, 0.02
        off = float((torch.linalg.svdvals(found.double()) - 1).abs().max())
        yield f"singular values of polar factors, 128 x {width}, from 1", off, 0.1
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    forms: dict[str, Callable[[nn.Module], nn.Module]]
    forms = {"DDP": nn.parallel.DistributedDataParallel, "FSDP2": sharded}
    for name in MAKERS:
        run = partial(trained, name, DEVICE, torch.float32, groups=1)  # FSDP2 divides no groups
        wanted = run()
        for form, wrap in forms.items():
            with one_process(backend):
                off = error(run(wrap), wanted)
            yield f"{name}, {backend} with one process, {form}, against none", off, 1e-3


def by_the_reference() -> Tensor:
    """Return what the reference of the tests adds to the weights."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from reference import ReferenceTHOR  # type: ignore[import-not-found]

    reference = ReferenceTHOR(network(), **THOR_OPTIONS)
    start = weights(reference.model)
    for x, y in batches():
        reference.step((x, lambda output, y=y: functional.cross_entropy(output, y)))
    return weights(reference.model) - start


def in_own_precision(parts: list[Tensor]) -> list[Tensor]:
    """Stand in for ``polar._polar``, with products in the precision of the matrices."""
    return [polar._by_products(polar._with_largest_entry_1(part), part.dtype) for part in parts]


@contextmanager
def one_process(backend: str) -> Iterator[None]:
    """Let this process be the only process of a group."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model over the processes that there are."""
    fully_shard(model, mesh=init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
    return model


def jobs() -> list[dict[str, Any]]:
    """List the only job."""
    return [{"check": "all"}]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Make all checks.

    Raises:
        ArithmeticError: Errors are not below their limits.
    """
    found = list(errors())
    far = [f"{name}: {off:.1e}" for name, off, limit in found if not off < limit]
    if far:
        raise ArithmeticError(f"above the limit: {'; '.join(far)}")
    return {"checks": found}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the errors and their limits."""
    found = [check for row in rows for check in row["checks"]]
    lines = [[name, f"{off:.1e}", f"{limit:.0e}"] for name, off, limit in found]
    return markdown(("check", "relative error", "limit"), lines)
