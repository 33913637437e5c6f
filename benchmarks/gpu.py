"""The Python part of gpu.sh: checks, step times, profiles and others' trainings on a GPU.

Parts, in the order of importance, each as far as the time goes:

1. checks: THOR against the float64 reference of the tests, ThorMuon against the CPU, the polar
   factors that a GPU computes by products in bfloat16, and one process with NCCL under DDP and
   FSDP2 against none;
2. CIFAR-10 with airbench94 (gpu_airbench.py), whose file is fetched to build/airbench, with the
   data in build/cifar10;
3. Shakespeare with nanoGPT (gpu_nanogpt.py), two files of which are fetched to build/nanogpt, with
   the text in build/shakespeare;
4. step times of ResNet-50 (224 pixels, batch 256) and BERT-base (128 tokens, batch 64) in bfloat16,
   as in step_time.py;
5. profiles of the same networks and of GPT-2 (1024 tokens, batch 8): kernels and synchronisations,
   memory and times, beside torch's fused AdamW and Muon (gpu_profile.py).

At the end one table has the times of steps and the results on others' code (gpu_summary.py).

A part that fails is reported, and the others go on. `--device cpu --tiny` runs a miniature of
everything.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
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

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))  # where the reference lies
AIRBENCH_SECONDS, NANOGPT_SECONDS = 200.0, 225.0  # at most
OURS = {"THOR": ("THOR", {"damping": 0.3, "split_dim": 16}), "ThorMuon": ("ThorMuon", {})}


class Report:
    """What is printed, and written into gpu.md and gpu.json after each part.

    Args:
        out: The folder.
        seconds: How long everything may take.
    """

    def __init__(self, out: Path, seconds: float) -> None:
        self.start = time.monotonic()
        self.out, self.end, self.lines = out, self.start + seconds, [""]
        self.found: dict[str, Any] = {}
        self.failures: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line, and keep it."""
        print(line, flush=True)
        self.lines.append(line)

    def part(self, name: str, run: Callable[["Report"], Any]) -> None:
        """Run a part; a failure is told, and counts at the end."""
        self.say(f"\n## {name}\n")
        print(f"after {time.monotonic() - self.start:.0f} s", flush=True)
        try:
            self.found[name] = run(self)
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{name}: {type(error).__name__}: {error}")
        self.save()

    def fail(self, what: str) -> None:
        """Note a failure."""
        self.failures.append(what)
        self.say(f"\nFAILED: {what}")

    def save(self) -> None:
        """Write both files."""
        self.out.mkdir(parents=True, exist_ok=True)
        found = {**self.found, "failures": self.failures}
        (self.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (self.out / "gpu.md").write_text("\n".join(self.lines).strip() + "\n")

    def row(self, *cells: Any) -> None:
        """Say a line of a table."""
        self.say("| " + " | ".join(map(str, cells)) + " |")

    def heads(self, *cells: str) -> None:
        """Begin a table."""
        self.row(*cells)
        self.say("|---" * len(cells) + "|")


# ---- checks --------------------------------------------------------------------------------------


def network(groups: int = 2) -> nn.Sequential:
    """Return a network with convolutions, one of them with groups, and a linear layer."""
    torch.manual_seed(0)
    first, second = (
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, stride=2, groups=groups),
    )
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(72, 5))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of four steps, on the CPU, in float64."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield (
            torch.randn(6, 3, 8, 8, generator=generator).double(),
            torch.randint(5, (6,), generator=generator),
        )


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make one of ours, with a refresh in every second step."""
    kind, options = OURS[name]
    made = getattr(importlib.import_module("torch_thor"), kind)
    return made(model, lr=0.02, update_interval=2, **options)


def trained(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    *,
    steps: int = 4,
    groups: int = 2,
) -> Tensor:
    """Return what the steps of one of ours have added to the weights, on the CPU, in float64."""
    model = network(groups).to(device, dtype)
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().double()
    net = wrap(model)
    optimizer = optimizer_of(name, model)
    for (x, y), _ in zip(batches(), range(steps), strict=False):
        functional.cross_entropy(net(x.to(device, dtype)), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in weights]).cpu().double() - start


def polars_in_own_precision(polar: Any, parts: list[Tensor]) -> list[Tensor]:
    """Stand in for ``polar._polar``, with products in the precision of the matrices."""
    return [polar._by_products(polar._with_largest_entry_1(part), part.dtype) for part in parts]


def reference() -> Tensor:
    """Return what the reference adds to the weights in the same steps."""
    _, options = OURS["THOR"]
    by_hand = importlib.import_module("reference").ReferenceTHOR(
        network().double(), lr=0.02, update_interval=2, **options
    )
    start = torch.cat([p.detach().flatten().clone() for p in by_hand.model.parameters()])
    for x, y in batches():
        by_hand.step((x, lambda output, y=y: functional.cross_entropy(output, y)))
    return torch.cat([p.detach().flatten() for p in by_hand.model.parameters()]) - start


def error(found: Tensor, wanted: Tensor) -> float:
    """Return a relative error."""
    return float((found - wanted).norm() / wanted.norm())


def errors(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Yield each check: what it compares, the error and its limit."""
    single, double, cpu = torch.float32, torch.float64, torch.device("cpu")
    # as training scripts have it; factors must not follow
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    wanted = {"THOR": reference(), "ThorMuon": trained("ThorMuon", cpu, double, steps=1)}
    yield (
        "THOR, float64, against the reference",
        error(trained("THOR", device, double), wanted["THOR"]),
        1e-7,
    )
    yield (
        "THOR, float32, against the reference",
        error(trained("THOR", device, single), wanted["THOR"]),
        0.02,
    )
    # Six iterations are not exact. In bfloat16 they also fill directions without a gradient, whose
    # rounding errors they take for singular values: the columns of the last layer's gradient sum to
    # 0. These errors have no right value, so the rest of the step is tested with products in the
    # weights' own precision, and bfloat16 below, on matrices of full rank.
    polar = importlib.import_module("torch_thor.curvature.polar")
    with mock.patch.object(polar, "_polar", partial(polars_in_own_precision, polar)):
        for dtype in (double, single):
            off = error(trained("ThorMuon", device, dtype, steps=1), wanted["ThorMuon"])
            yield f"ThorMuon, {dtype}, a step against the CPU", off, 0.02
    for rows, columns in ((128, 256), (128, 512), (128, 4608)):
        matrices = torch.randn(4, rows, columns, device=device)
        (found,), (exact,) = map(polar.orthogonalise, ([matrices], [matrices.double().cpu()]))
        off = error(found.double().cpu(), exact)
        yield f"polar factors, {rows} x {columns}, against the CPU", off, 0.02
        off = float((torch.linalg.svdvals(found.double()) - 1).abs().max())
        yield f"singular values of polar factors, {rows} x {columns}, from 1", off, 0.1
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        # FSDP2 divides no groups
        alone = {name: trained(name, device, single, groups=1) for name in OURS}
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            for name in OURS:
                for form, wrap in (
                    ("DDP", nn.parallel.DistributedDataParallel),
                    ("FSDP2", sharded),
                ):
                    found = trained(name, device, single, wrap, groups=1)
                    yield (
                        f"{name}, {backend} with one process, {form}, against none",
                        error(found, alone[name]),
                        1e-3,
                    )
        finally:
            dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model over the processes that there are."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model


def check(report: Report, device: torch.device) -> list[dict[str, Any]]:
    """Make all checks."""
    report.heads("check", "relative error", "limit")
    found: list[dict[str, Any]] = []
    for name, off, limit in errors(device):
        report.row(name, f"{off:.1e}", f"{limit:.0e}")
        found.append({"check": name, "error": off, "limit": limit})
    for one in found:
        if not one["error"] < one["limit"]:
            report.fail(f"{one['check']}: {one['error']:.1e} is not below {one['limit']:.0e}")
    return found


# ---- times ---------------------------------------------------------------------------------------


def times(
    report: Report, device: torch.device, networks: Iterable[tuple[str, int, int]], rounds: int
) -> Any:
    """Time the steps of the networks."""
    study = importlib.import_module("benchmarks.step_time")
    rows = {}
    for name, batch, side in networks:
        rows[name] = {
            "job": {"model": name},
            "batch": batch,
            **study.measure(name, device, batch, side, rounds),
        }
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.say(study.table(rows))
    for name, row in rows.items():
        seconds = sorted(row["seconds"]["SGD"])[rounds // 2]
        report.say(f"\n{name}, batch {row['batch']}: a step of SGD takes {1000 * seconds:.1f} ms.")
    return rows


# ---- profiles ------------------------------------------------------------------------------------


def profiles(
    report: Report, device: torch.device, subject: tuple[str, int, int], rounds: int
) -> dict[str, dict[str, Any]]:
    """Profile all optimizers on a network."""
    study = importlib.import_module("benchmarks.gpu_profile")
    name, batch, side = subject
    rows: dict[str, dict[str, Any]] = study.measure(name, device, batch, side, rounds)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    report.say(study.table(rows, device))
    return rows


# ---- studies on fetched code ---------------------------------------------------------------------


def study(report: Report, module: str, words: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run a study in a process of its own, which can't break the other parts or take their time.

    Args:
        report: Where its table goes.
        module: Its name with its package.
        words: Its arguments but for the file of rows and the time.
        seconds: How long it may take; no training starts where one like it would not fit.
    """
    name = module.rpartition(".")[2]
    out = report.out / f"{name}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    script = [sys.executable, "-u", "-m", module, *words]
    process = subprocess.Popen(
        [*script, "--out", str(out), "--seconds", str(seconds - 5)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )
    try:
        code = process.wait(seconds + 10)
    except subprocess.TimeoutExpired:
        # workers of the compiler too
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    report.say(importlib.import_module(module).table(rows))
    for row in rows:
        if "failure" in row:
            report.fail(f"{name}, {row['job']}: {row['failure']}")
    if code:
        report.fail(f"{name}: ended with {code} after {len(rows)} trainings")
    return rows


def studies(report: Report, device: str, folder: Path, *, tiny: bool) -> None:
    """Run the studies of which the folder has the code and the data."""
    build = {name: folder / name for name in ("airbench", "cifar10", "nanogpt", "shakespeare")}
    own = ["--device", device, *(["--tiny"] if tiny else [])]
    parts = (
        (
            "CIFAR-10 with airbench94",
            "benchmarks.gpu_airbench",
            {"--code": build["airbench"] / "airbench94_muon.py", "--data": build["cifar10"]},
            AIRBENCH_SECONDS,
        ),
        (
            "Shakespeare with nanoGPT",
            "benchmarks.gpu_nanogpt",
            {"--code": build["nanogpt"], "--text": build["shakespeare"] / "input.txt"},
            NANOGPT_SECONDS,
        ),
    )
    for title, module, files, seconds in parts:
        missing = [str(file) for file in files.values() if not file.exists()]
        if missing:
            report.say(f"\n## {title}\n\nskipped: there is no {' and no '.join(missing)}")
            continue
        words = [*own, *(word for key, file in files.items() for word in (key, str(file)))]
        report.part(title, partial(study, module=module, words=words, seconds=seconds))


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder of gpu.md and gpu.json"
    )
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build", help="folder of fetched code and data"
    )
    parser.add_argument(
        "--seconds", type=float, default=480, help="no training starts later (default: %(default)s)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small networks and few steps, to test the script"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is visible to torch; --device cpu --tiny runs a miniature on the CPU"
        )
    device, report = torch.device(options.device), Report(options.out, options.seconds)
    machine = report.found["machine"] = importlib.import_module(
        "benchmarks.runner.machine"
    ).provenance()
    report.say(f"# {machine['device']}, torch {torch.__version__}, commit {machine['commit'][:8]}")
    report.part("Checks", lambda own: check(own, device))
    studies(report, options.device, options.build, tiny=options.tiny)
    networks = (
        # of small layers: Muon computes in bfloat16, which some CPUs only have very slowly
        (("squeezenet1_1", 2, 32), ("bert-tiny", 2, 16))
        if options.tiny
        else (("resnet50", 256, 224), ("bert-base", 64, 128))
    )
    report.part("Step times", lambda own: times(own, device, networks, 1 if options.tiny else 20))
    gpt = ("gpt2-tiny", 2, 16) if options.tiny else ("gpt2", 8, 1024)
    # a part each: where one does not fit into the memory, the others go on
    for subject in (*networks, gpt):
        name, batch, _ = subject
        report.part(
            f"Profile of {name}, batch {batch}",
            partial(profiles, device=device, subject=subject, rounds=1 if options.tiny else 10),
        )
    report.say("\n## In one table\n")
    report.say(importlib.import_module("benchmarks.gpu_summary").table(report.found))
    report.save()
    if report.failures:
        raise SystemExit("\n".join(["failed:", *report.failures]))


if __name__ == "__main__":
    main()
