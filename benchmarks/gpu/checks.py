"""Checks of THOR and ThorMuon on a GPU, each of which fails where its error is not below a limit.

THOR is compared with the float64 reference of the tests, ThorMuon with the CPU, and training in one
process with NCCL under DDP and FSDP2 with training in none. A GPU computes polar factors by
products in bfloat16, which are compared with exact factors.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
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

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"lr": 0.02, "update_interval": 2}
THOR_OPTIONS: dict[str, Any] = {**OPTIONS, "damping": 0.3, "split_dim": 16}
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "THOR": partial(THOR, **THOR_OPTIONS),
    "ThorMuon": partial(ThorMuon, **OPTIONS),
}
WIDTHS = (256, 512, 4608)  # of matrices of 128 rows


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


def against_the_reference(dtype: torch.dtype) -> float:
    """Return the error of four steps of THOR."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from reference import ReferenceTHOR  # type: ignore[import-not-found]

    reference = ReferenceTHOR(network(), **THOR_OPTIONS)
    start = weights(reference.model)
    for x, y in batches():
        reference.step((x, lambda output, y=y: functional.cross_entropy(output, y)))
    return error(trained("THOR", DEVICE, dtype), weights(reference.model) - start)


def against_the_cpu(dtype: torch.dtype) -> float:
    """Return the error of a step of ThorMuon, with products in the precision of the weights.

    In bfloat16 the products also fill directions without a gradient, whose rounding errors they
    take for singular values. These errors have no right value.
    """
    wanted = trained("ThorMuon", CPU, torch.float64, steps=1)
    with mock.patch.object(polar, "_polar", in_own_precision):
        return error(trained("ThorMuon", DEVICE, dtype, steps=1), wanted)


def in_own_precision(parts: list[Tensor]) -> list[Tensor]:
    """Stand in for ``polar._polar``, with products in the precision of the matrices."""
    return [polar._by_products(polar._with_largest_entry_1(part), part.dtype) for part in parts]


def polar_factors(width: int) -> tuple[Tensor, Tensor]:
    """Return polar factors of random matrices, and the exact ones."""
    matrices = torch.randn(4, 128, width, device=DEVICE)
    (found,), (exact,) = map(polar.orthogonalise, ([matrices], [matrices.double().cpu()]))
    return found.double(), exact


def against_exact_factors(width: int) -> float:
    """Return the error of polar factors."""
    found, exact = polar_factors(width)
    return error(found.cpu(), exact)


def singular_values(width: int) -> float:
    """Return how far a singular value of a polar factor is from 1 at most."""
    return float((torch.linalg.svdvals(polar_factors(width)[0]) - 1).abs().max())


def against_no_process(name: str, wrap: Callable[[nn.Module], nn.Module]) -> float:
    """Return the error of four steps in one process of a group."""
    run = partial(trained, name, DEVICE, torch.float32, groups=1)  # FSDP2 divides no groups
    wanted = run()
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            return error(run(wrap), wanted)
        finally:
            dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model over the processes that there are."""
    fully_shard(model, mesh=init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
    return model


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": sharded,
}
# limit and error by what is compared; the first group has TensorFloat-32, which factors ignore
IN_TF32: dict[str, tuple[float, Callable[[], float]]] = {
    "THOR, float64, against the reference": (1e-7, partial(against_the_reference, torch.float64)),
    "THOR, float32, against the reference": (0.02, partial(against_the_reference, torch.float32)),
}
for dtype in (torch.float64, torch.float32):
    name = f"ThorMuon, {dtype}, a step against the CPU"
    IN_TF32[name] = 0.02, partial(against_the_cpu, dtype)
for width in WIDTHS:
    name = f"polar factors, 128 x {width}, against the CPU"
    IN_TF32[name] = 0.02, partial(against_exact_factors, width)
    name = f"singular values of polar factors, 128 x {width}, from 1"
    IN_TF32[name] = 0.1, partial(singular_values, width)
CHECKS = IN_TF32 | {
    f"{name}, nccl with one process, {form}, against none": (
        1e-3, partial(against_no_process, name, wrap),
    )
    for name in MAKERS
    for form, wrap in FORMS.items()
}  # fmt: skip


def jobs() -> list[dict[str, Any]]:
    """List the checks."""
    return [{"check": name} for name in CHECKS]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Make a check."""
    limit, measured = CHECKS[job["check"]]
    if job["check"] in IN_TF32:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    off = measured()
    if not off < limit:
        raise ArithmeticError(f"{off:.1e} is not below {limit:.0e}")
    return {"error": off, "limit": limit}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the errors and their limits."""
    lines = [[row["job"]["check"], f"{row['error']:.1e}", f"{row['limit']:.0e}"] for row in rows]
    return markdown(("check", "relative error", "limit"), lines)
