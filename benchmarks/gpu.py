"""The Python part of gpu.sh: checks THOR on the device, times it, prints a table, writes gpu.md and gpu.json.

No network is trained here. The check compares single steps with the reference implementation, which has no training
loop. The timed steps use one fixed batch, so they include neither reading of data nor recording of losses. For both
reasons this script has loops of its own instead of the loop of the application.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional

from torch_thor import THOR, SplitChoice, ThorMuon, choose_split_dim
from torch_thor.bench import describe, write_json
from torch_thor.curvature import polar
from torch_thor.curvature.polar import orthogonalise
from torch_thor.files import write_text
from torch_thor.tools.split_dim import sample_images
from torch_thor.training.optimizers import MuonAdamW

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where the float64 reference is
ReferenceTHOR = importlib.import_module("reference").ReferenceTHOR

BUDGET = 540.0  # seconds, of which compiling may take most
NEVER = 10**9


def check_oracle(device: torch.device) -> dict[str, float]:
    """Take four steps on the device and in the reference.

    Args:
        device: where THOR runs.

    Returns:
        The largest relative error of a weight, in float64 and in float32 (TF32 allowed for everything else).

    Raises:
        AssertionError: they differ by more than rounding.
    """
    errors = {}
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as training scripts have it; factors must not follow
    for dtype, limit in ((torch.float64, 1e-7), (torch.float32, 5e-3)):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, groups=2),
            nn.Flatten(),
            nn.Linear(8 * 9, 5),
        )
        options: dict[str, Any] = {"lr": 0.02, "damping": 0.3, "update_interval": 2, "split_dim": 16}
        reference = ReferenceTHOR(model.double(), **options)
        fast = nn.Sequential(*model).to(device, dtype)
        optimizer = THOR(fast, **options)
        for _ in range(4):
            x, y = torch.randn(6, 3, 8, 8).double(), torch.randint(5, (6,))
            reference.step((x, lambda output, y=y: functional.cross_entropy(output, y)))
            functional.cross_entropy(fast(x.to(device, dtype)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = dict(reference.model.named_parameters())
        error = max(
            float((p.detach().cpu().double() - wanted[name].detach()).norm() / wanted[name].detach().norm())
            for name, p in fast.named_parameters()
        )
        assert error < limit, f"{dtype}: relative error {error:.1e} is above {limit}"
        errors[str(dtype).removeprefix("torch.")] = error
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return errors


def synchronised(device: torch.device) -> float:
    """Wait for the device and return the time.

    Args:
        device: the device.

    Returns:
        Seconds.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def step_times(
    device: torch.device, build: Callable[[nn.Module], torch.optim.Optimizer], compiled: bool, sizes: dict[str, int]
) -> dict[str, float]:
    """Time training steps of ResNet-50 in bfloat16.

    Args:
        device: where.
        build: makes the optimizer.
        compiled: whether the model is compiled, after the optimizer was made.
        sizes: batch, pixels, steps.

    Returns:
        Median seconds, images a second and peak memory in GiB.
    """
    torch.manual_seed(0)
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    optimizer = build(model)
    forward = torch.compile(model) if compiled else model
    images = torch.randn(sizes["batch"], 3, sizes["pixels"], sizes["pixels"], device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (sizes["batch"],), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for index in range(sizes["steps"] + 3):
        started = synchronised(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if index >= 3:
            seconds.append(synchronised(device) - started)
    median = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return {"seconds": median, "images_per_second": sizes["batch"] / median, "peak_gib": peak}


def inverse_times(device: torch.device, sizes: dict[int, int]) -> dict[int, dict[str, float]]:
    """Time batched Cholesky inverses against batched eigendecompositions.

    Args:
        device: where.
        sizes: block size to number of blocks.

    Returns:
        Median seconds by block size and method.
    """

    def cholesky(blocks: torch.Tensor) -> torch.Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(blocks)[0])

    def eigen(blocks: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(blocks)
        return (vectors / values[:, None]) @ vectors.mT

    result: dict[int, dict[str, float]] = {}
    for size, count in sizes.items():
        samples = torch.randn(count, size, 2 * size, device=device)
        blocks = samples @ samples.mT / (2 * size) + 0.1 * torch.eye(size, device=device)
        result[size] = {"blocks": count}
        for name, method in (("cholesky", cholesky), ("eigh", eigen)):
            seconds = []
            for index in range(4):
                started = synchronised(device)
                method(blocks)
                if index:
                    seconds.append(synchronised(device) - started)
            result[size][name] = statistics.median(seconds)
    return result


def polar_times(device: torch.device, shapes: dict[tuple[int, int], int]) -> dict[str, dict[str, float]]:
    """Check and time the polar factors of ThorMuon.

    Args:
        device: where.
        shapes: rows and columns of a block to number of blocks.

    Returns:
        By shape: blocks; median seconds of what the package does on the device, of the same products in float32 and of
        the exact factors; the largest distance of a singular value from 1 in the first.

    Raises:
        AssertionError: a singular value is off by more than 0.1.
    """
    result = {}
    for (rows, columns), count in shapes.items():
        blocks = torch.randn(count, rows, columns, device=device)
        unit = polar._with_largest_entry_1(blocks)
        methods: dict[str, Callable[[], Any]] = {
            "package": lambda blocks=blocks: orthogonalise([blocks])[0],
            "float32": lambda unit=unit: polar._by_products(unit, torch.float32),
            "eigen": lambda unit=unit: polar._roots(unit @ unit.mT) @ unit,
        }
        row: dict[str, float] = {"blocks": count}
        for name, method in methods.items():
            seconds = []
            for _ in range(5):
                started = synchronised(device)
                found = method()
                seconds.append(synchronised(device) - started)
            row[name] = statistics.median(seconds[1:])
            if name == "package":
                row["error"] = float((torch.linalg.svdvals(found[:2].double()) - 1).abs().max())
        assert row["error"] < 0.1, f"{rows} x {columns}: a singular value is off by {row['error']:.2f}"
        result[f"{rows} x {columns}"] = row
    return result


def split_choice(device: torch.device, real: bool) -> tuple[SplitChoice, str]:
    """Choose the split dimension of ResNet-50 on the device.

    Args:
        device: where to measure.
        real: False for a small network instead.

    Returns:
        The choice, and what the sample was.
    """
    try:
        images, source = sample_images(32 if real else 2, 224 if real else 64, None, 0)
    except ModuleNotFoundError:  # scikit-learn, whose photographs these are
        images, source = torch.rand(32 if real else 2, 3, 224, 224), "random numbers: scikit-learn is missing"
    model = torchvision.models.get_model("resnet50" if real else "squeezenet1_1")
    return choose_split_dim(model, images, device), source


def main() -> None:
    """Run what the time allows, in the order of importance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible to torch; DEVICE=cpu runs a miniature on the CPU")
    device = torch.device(options.device)
    real = device.type == "cuda"
    sizes = {"batch": 256, "pixels": 224, "steps": 20} if real else {"batch": 2, "pixels": 64, "steps": 1}
    started = time.perf_counter()
    result: dict[str, Any] = {"machine": describe(), "sizes": sizes}
    lines = [f"# {result['machine']['device']}, torch {torch.__version__}, commit {result['machine']['commit']}", ""]

    def note(line: str) -> None:
        print(line)
        lines.append(line)

    def save() -> None:
        result["seconds_in_all"] = time.perf_counter() - started
        write_json(options.out / "gpu.json", result, indent=1)
        write_text(options.out / "gpu.md", "\n".join(lines) + "\n")

    result["oracle"] = check_oracle(device)
    note(f"Against the float64 reference, largest relative error of a weight after 4 steps: {result['oracle']}")
    inverse_sizes = {32: 1600, 64: 800, 128: 400, 256: 200, 512: 100, 1024: 50} if real else {32: 8, 64: 4}
    result["inverse"] = inverse_times(device, inverse_sizes)
    note("\n| block | count | Cholesky inverse, ms | eigendecomposition, ms |\n|---|---|---|---|")
    for size, row in result["inverse"].items():
        note(f"| {size} | {row['blocks']} | {row['cholesky'] * 1e3:.2f} | {row['eigh'] * 1e3:.2f} |")
    save()
    polar_shapes = {(128, 256): 256, (128, 512): 128, (128, 4608): 32} if real else {(16, 32): 2, (16, 64): 2}
    result["polar"] = polar_times(device, polar_shapes)
    note("\n| block | count | polar factors, ms | by products in float32, ms | exact, ms | singular values off by |")
    note("|---|---|---|---|---|---|")
    for shape, row in result["polar"].items():
        times = " | ".join(f"{row[name] * 1e3:.2f}" for name in ("package", "float32", "eigen"))
        note(f"| {shape} | {row['blocks']} | {times} | {row['error']:.4f} |")
    save()
    choice, source = split_choice(device, real)
    result["split_dim"] = {"sample": source, **choice.as_dict()}
    note(f"\nSplit dimension ({source}): the curves cross at {choice.crossing}, which gives {choice.split_dim}")
    save()

    def refreshed(kind: type[THOR] | type[ThorMuon], interval: int) -> Callable[[nn.Module], torch.optim.Optimizer]:
        def build(model: nn.Module) -> torch.optim.Optimizer:
            optimizer = kind(model, lr=1e-5, update_interval=interval)
            for group in optimizer.param_groups:  # every refresh takes new factors
                group["trace_thresholds"] = (0.0, 0.0)
            return optimizer

        return build

    trainings: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9),
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-6),
        "thor ordinary": refreshed(THOR, NEVER),
        "thor refresh": refreshed(THOR, 1),
        "muon": lambda model: MuonAdamW(model.parameters(), lr=1e-6),
        "scale-free ordinary": refreshed(ThorMuon, NEVER),
        "scale-free refresh": refreshed(ThorMuon, 1),
    }
    result["resnet50"] = {}
    note(f"\nResNet-50, {sizes['pixels']} pixels, batch {sizes['batch']}, bfloat16 autocast, channels_last\n")
    note("| optimizer | model | step, ms | over SGD's | images/s | peak GiB |\n|---|---|---|---|---|---|")
    for compiled in (False, True):
        for name, build in trainings.items():
            if time.perf_counter() - started > BUDGET - (120 if compiled else 0):
                note(f"| {name} | {'compiled' if compiled else 'eager'} | not run: out of time | | | |")
                continue
            torch.compiler.reset()
            kind = "compiled" if compiled else "eager"
            row = result["resnet50"][f"{name}, {kind}"] = step_times(device, build, compiled, sizes)
            ratio = row["seconds"] / result["resnet50"][f"sgd, {kind}"]["seconds"]
            note(
                f"| {name} | {kind} | {row['seconds'] * 1e3:.1f} | {ratio:.3f} | {row['images_per_second']:.0f} | "
                f"{row['peak_gib']:.2f} |"
            )
            save()
    save()


if __name__ == "__main__":
    main()
