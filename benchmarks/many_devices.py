"""What THOR and ThorMuon send on many processes, and how their steps scale.

Also what bfloat16 and divided matrices cost.

    python -m benchmarks many_devices           # runs what is missing: half an hour of two cores
    python -m benchmarks many_devices --table

- `bytes`: what one process sends, with rings: THOR's on a refresh in which all layers take new
  factors, those of Shampoo and Muon in every step, in addition to the gradients.
- `scaling`: BERT-mini (64 tokens, 8 samples for each process) on 1, 2 and 4 processes of one
  thread. In each round a session with each number is started, in which SGD and THOR with DDP, AdamW
  and THOR with FSDP2 take turns. The result is the time of a step over that on one process in the
  same round. On a machine with fewer cores than processes the times are longer by that.
- `bfloat16`: the character transformer of the suite on 2 processes with DDP, sending float32 or
  bfloat16; its held-out loss, and the error of the first update, ‖d − d'‖ / ‖d'‖ over all
  preconditioned weights.
- `rows`: the same under FSDP2 on 1, 2 and 4 processes with ThorMuon, which orthogonalises the rows
  of each process, or whole matrices.

In the last two each process has its own part of each batch, and the learning rate falls linearly to
0.
"""

import statistics
import time
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from benchmarks.local_ranks import on_ranks, parallel
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.suite_problems import PROBLEMS
from torch_thor import THOR, Distributed, ThorMuon
from torch_thor.split import loss_of
from torch_thor.tools.device_plan import subject_of
from torch_thor.tools.split_dim import Subject
from torch_thor.tools.traffic import (
    Collective,
    collectives_of_refresh,
    collectives_of_training,
    laid_out,
)
from torch_thor.training.models import bert
from torch_thor.training.recipe_model import Data, Recipe, Text, Transform

COUNTS, WORLDS, SEEDS = (8, 64, 256), (1, 2, 4), (0, 1, 2)
INTERVAL, ROUNDS, STEPS = 100, 4, 5
FORMS = {
    "sgd ddp": "SGD, DDP",
    "thor ddp": "THOR, DDP",
    "adamw fsdp": "AdamW, FSDP2",
    "thor fsdp": "THOR, FSDP2",
}
OURS = {"thor": THOR, "thor-muon": ThorMuon}
SENT = {
    "thor": "THOR, a refresh", "thor sharded": "THOR, FSDP2, a refresh", "gradients": "gradients",
    "shampoo": "Shampoo",
    "muon": "Muon", "muon sharded": "Muon, FSDP2",
}  # fmt: skip
Job = dict[str, Any]


def jobs(rows: dict[str, Any]) -> list[Job]:
    """List all jobs."""
    found: list[Job] = [{"part": "bytes", "model": model} for model in ("resnet50", "bert-large")]
    found += [
        {"part": "bfloat16", "form": form, "seed": seed, "alone": True}
        for form, seed in product(OURS, SEEDS)
    ]
    found += [
        {"part": "rows", "processes": world, "whole": whole, "seed": seed, "alone": True}
        for world, whole, seed in product(WORLDS, (False, True), SEEDS)
    ]
    return found + [{"part": "scaling", "round": number, "alone": True} for number in range(ROUNDS)]


def run(job: Job) -> dict[str, Any]:
    """Compute or measure one of the parts."""
    match job["part"]:
        case "bytes":
            return {"sent": {str(n): dict(sent_by(job["model"], n)) for n in COUNTS}}
        case "bfloat16":
            found = {
                dtype: on_ranks(2, in_bfloat16, job["form"], dtype, job["seed"])[0]
                for dtype in (None, "bfloat16")
            }
            (exact, first), (rounded, other) = found[None], found["bfloat16"]
            return {
                "float32": exact,
                "bfloat16": rounded,
                "error": ((other - first).norm() / first.norm()).item(),
            }
        case "rows":
            return {"loss": on_ranks(job["processes"], in_rows, job["whole"], job["seed"])[0]}
    order = WORLDS if job["round"] % 2 == 0 else WORLDS[::-1]
    return {"seconds": {str(world): on_ranks(world, session)[0] for world in order}}


def optimizers(job: Job) -> list[str]:
    """Name ours: the form of a job, ThorMuon where rows are divided, otherwise THOR."""
    form = job.get("form", "thor-muon" if job["part"] == "rows" else "thor")
    return [OURS[form].__name__]


# ---- bytes ---------------------------------------------------------------------------------------


def subject(word: str, count: int, pixels: int, length: int) -> Subject:
    """Build a model with a batch of random samples."""
    if bert.is_known(word):
        recipe = Recipe(
            task="masked-lm", model=word, data=Data(name="corpus", text=Text(length=length))
        )
    else:
        recipe = Recipe(
            model=word,
            data=Data(name="image-folder", transform=Transform(size=pixels, resize=pixels)),
        )
    return subject_of(word, recipe, count)


def matrix_elements(model: nn.Module) -> int:
    """Count the elements that Muon trains.

    These are weights of two and more dimensions, except for embeddings and classifiers.
    """
    left_out = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    # of classes, or of pairs
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    left_out.add(id(last.weight))
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in left_out)


def sent_by(word: str, n: int) -> Iterator[tuple[str, int]]:
    """Yield the bytes that one of n processes sends, by form."""

    def total(collectives: list[Collective]) -> int:
        return sum(one.sent for one in collectives)

    with torch.device("meta"):
        model = subject(word, 1, 224, 128).model
    layers = list(THOR(model).curvature.values())
    elements, matrices = sum(p.numel() for p in model.parameters()), matrix_elements(model)
    yield "gradients", total(collectives_of_training(model, n))
    yield "thor", total(collectives_of_refresh(layers, n))
    sharded = laid_out(layers, n, shards=n)
    yield "thor sharded", total(collectives_of_refresh(sharded, n))
    yield "shampoo", 4 * elements * (n - 1) // n
    yield "muon", 4 * matrices * (n - 1) // n
    yield "muon sharded", 2 * 2 * matrices * (n - 1) // n**2


# ---- weak scaling --------------------------------------------------------------------------------


def session(rank: int, world: int) -> dict[str, list[float]]:
    """Time steps in one session, and return the seconds by training.

    Those of THOR's refreshes are under their own name.
    """
    warnings.simplefilter("ignore")
    steps: dict[str, tuple[Subject, nn.Module, torch.optim.Optimizer]] = {}
    seconds: dict[str, list[float]] = {}
    for name in FORMS:
        sample = subject("bert-mini", 8, 0, 64)
        model = parallel(sample.model, world, sharded=name.endswith("fsdp"))
        if name.startswith("thor"):
            optimizer: torch.optim.Optimizer = THOR(
                sample.model, lr=1e-6, update_interval=2, trace_thresholds=(0.0, 0.0)
            )
        else:
            kind = torch.optim.SGD if name.startswith("sgd") else torch.optim.AdamW
            optimizer = kind(sample.model.parameters(), lr=1e-6)
        steps[name] = (sample, model, optimizer)
    for turn in range(2 * (STEPS + 1)):
        for name, (sample, model, optimizer) in steps.items():
            dist.barrier()
            started = time.perf_counter()
            loss_of(model, sample.batch, sample.loss_fn, torch.device("cpu")).backward()
            optimizer.step()
            dist.barrier()
            ended = time.perf_counter()
            optimizer.zero_grad()
            if turn >= 2:
                own = f"{name} refresh" if name.startswith("thor") and turn % 2 == 0 else name
                seconds.setdefault(own, []).append(round(ended - started, 5))
    return seconds


def scaling(rounds: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the time of a step over that on one process, by form, processes and round.

    Every 100th step is a refresh.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for one in rounds:
        for name, world in product(FORMS, [str(n) for n in WORLDS]):
            taken = []
            for seconds in (one[world], one["1"]):
                own = statistics.median(seconds[name])
                refresh = statistics.median(seconds.get(f"{name} refresh", seconds[name]))
                taken.append(own + (refresh - own) / INTERVAL)
            found.setdefault(name, {}).setdefault(world, []).append(taken[0] / taken[1])
    return found


# ---- quality -------------------------------------------------------------------------------------


def trained(
    model: nn.Module,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: tuple[int, int],
    seed: int,
) -> Iterator[int]:
    """Train the character transformer of the suite, and yield after each step.

    Each process trains on its part of each batch.
    """
    problem, (rank, world) = PROBLEMS["characters"], ranks
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / problem.steps)
    for step, (windows,) in zip(
        range(problem.steps), problem.batches(problem.batch, seed), strict=False
    ):
        optimizer.zero_grad()
        problem.loss(net, (windows[rank::world],)).backward()
        optimizer.step()
        schedule.step()
        yield step


def held_out(net: nn.Module) -> float:
    """Return the held-out loss.

    Under FSDP2 all processes compute it, because each forward pass needs all.
    """
    problem = PROBLEMS["characters"]
    with torch.no_grad():
        return torch.cat([problem.score(net, batch) for batch in problem.held_out(1)]).mean().item()


def in_bfloat16(
    rank: int, world: int, form: str, dtype: str | None, seed: int
) -> tuple[float, torch.Tensor]:
    """Return the held-out loss, and the first update."""
    torch.manual_seed(seed)
    model = PROBLEMS["characters"].model()
    optimizer = OURS[form](
        model, distributed=Distributed(communication_dtype=getattr(torch, dtype) if dtype else None)
    )
    weights = [layer.weight for layer in optimizer.curvature.values()]
    start = torch.cat([weight.detach().flatten() for weight in weights])
    first = start
    for step in trained(
        model, parallel(model, world, sharded=False), optimizer, (rank, world), seed
    ):
        if step == 0:
            first = torch.cat([weight.detach().flatten() for weight in weights]) - start
    return held_out(model), first


def in_rows(rank: int, world: int, whole: bool, seed: int) -> float:
    """Return the held-out loss under FSDP2."""
    torch.manual_seed(seed)
    model = PROBLEMS["characters"].model()
    net = parallel(model, world, sharded=True)
    optimizer = ThorMuon(model, distributed=Distributed(whole_matrices=whole))
    for _ in trained(model, net, optimizer, (rank, world), seed):
        pass
    return held_out(net)


# ---- tables --------------------------------------------------------------------------------------


def table(rows: dict[str, Any]) -> str:
    """Return a table for each part."""
    parts: dict[str, list[Any]] = {}
    for row in rows.values():
        parts.setdefault(row["job"]["part"], []).append(row)
    sent = [
        [row["job"]["model"], n, *(f"{found[name] / 1e6:,.1f}" for name in SENT)]
        for row in parts.get("bytes", [])
        for n, found in row["sent"].items()
    ]
    ratios = scaling([row["seconds"] for row in parts.get("scaling", [])])
    scaled = [
        [
            FORMS[name],
            *(
                f"{statistics.median(found[n]):.2f} ({min(found[n]):.2f}-{max(found[n]):.2f})"
                for n in ("2", "4")
            ),
        ]
        for name, found in ratios.items()
    ]
    rounded = []
    for form in OURS:
        own = [row for row in parts.get("bfloat16", []) if row["job"]["form"] == form]
        if len(own) > 1:
            losses = [[row[dtype] for row in own] for dtype in ("float32", "bfloat16")]
            change = statistics.fmean(losses[1]) / statistics.fmean(losses[0]) - 1
            error = statistics.fmean(row["error"] for row in own)
            rounded.append([form, *map(with_error, losses), f"{change:+.2%}", f"{error:.2%}"])
    in_parts = []
    for world in WORLDS:
        of_world = [row for row in parts.get("rows", []) if row["job"]["processes"] == world]
        losses = [
            [row["loss"] for row in of_world if row["job"]["whole"] == whole]
            for whole in (False, True)
        ]
        if all(len(own) > 1 for own in losses):
            change = statistics.fmean(losses[0]) / statistics.fmean(losses[1]) - 1
            in_parts.append([str(world), *map(with_error, losses), f"{change:+.1%}"])
    tables = {
        ("model", "processes", *SENT.values()): sent,
        ("training", "2 processes", "4 processes"): scaled,
        ("optimizer", "float32", "bfloat16", "difference", "error of the first update"): rounded,
        ("processes", "rows of each process", "whole matrices", "difference"): in_parts,
    }
    return "\n\n".join(markdown(heads, lines) for heads, lines in tables.items() if lines)
