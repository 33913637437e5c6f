"""`torch-thor plan`: what an optimizer keeps and sends, and how long a training takes.

It tells so before many devices are rented.

Bytes are exact. Times are those of a step that is measured on one device, plus the network: a
collective of p devices is a ring, which takes rounds · latency + sent bytes / bandwidth, with p - 1
rounds, or 2 (p - 1) for an all-reduce. Nothing overlaps, all layers take new factors on each
refresh, and a device inverts its share of the blocks.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from torch_thor.distributed.assignment import imbalance
from torch_thor.errors import require
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.registry import WITH_CURVATURE
from torch_thor.printing import columns, printer
from torch_thor.split import LARGEST, device_name, inverse_seconds, loss_of
from torch_thor.tools import traffic
from torch_thor.tools.split_dim import CLASSES, Subject, load_subject
from torch_thor.torch_internals import tree_leaves
from torch_thor.training.models import bert
from torch_thor.training.models.library import build_model
from torch_thor.training.optimizers import build_optimizer
from torch_thor.training.parallel import device_of
from torch_thor.training.precision import Precision
from torch_thor.training.recipe_model import Data, Recipe
from torch_thor.training.recipes import is_file_name, load_recipe, recipe_names

VOCABULARY = 30522  # of BERT
OF_DATA = {"digits": 10, "fashion-mnist": 10, "cifar10": 10, "cifar100": 100}  # classes
# so that every second step refreshes all layers
WHEN_MEASURED: dict[str, dict[str, Any]] = {
    "thor": {"trace_thresholds": (0.0, 0.0), "fisher": "empirical"},
    "thor-muon": {},
}
# the columns of the tables: a number of a row, and its unit
SIZES = {
    "in all": ("memory", 1e6),
    "factors": ("curvature", 1e6),
    "sums": ("sums", 1e6),
    "sent, step": ("sent", 1e6),
    "+ refresh": ("sent_more", 1e6),
    "work": ("most_work", 1),
}
TIMES = {
    "step, ms": ("step", 1e-3),
    "network": ("network", 1e-3),
    "refresh": ("refresh", 1e-3),
    "all, min": ("training", 60),
}


def plan(
    subject: str,
    console: Console,
    *,
    words: Sequence[str] = (),
    devices: Sequence[int] = (1, 8, 64, 256),
    shards: int = 8,
    optimizer: str | None = None,
    split_dim: int | None = None,
    batch: int | None = None,
    samples: int = 1_000_000,
    bandwidth: float = 50.0,
    latency: float = 14.0,
    device: str = "auto",
    out: Path | None = None,
) -> list[dict[str, Any]]:
    """Print and return a row for each way and number of devices, as `torch-thor plan` does."""
    recipe, say = recipe_of(subject, words), printer(console)
    name = optimizer or next((n for n in recipe.optimizer if n in WITH_CURVATURE), "thor-muon")
    options = dict(recipe.optimizers.get(name, {}))
    if split_dim is not None:
        options["split_dim"] = split_dim
    with torch.device("meta"):
        model = subject_of(subject, recipe, 1).model
    thor: Any = build_optimizer(name, model, options | {"lr": 1e-3})
    divided = [
        *(("ddp", number, 1) for number in devices),
        *(("fsdp", number, number) for number in devices if number > 1),
        *(("hsdp", n, shards) for n in devices if n > shards and n % shards == 0),
    ]
    rows = [row_of(thor, *each) for each in divided]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{subject}, {name}: {len(thor.curvature)} layers with curvature, {trained:,} parameters")
    console.print(
        table("MB that a device keeps and sends; the most work of one over the mean", SIZES, rows)
    )
    content = {"model": subject, "optimizer": name, "shards": shards, "rows": rows}
    if batch is not None:
        say(f"Measuring a step on {device_of(device)} ...")
        measured = measure(
            subject_of(subject, recipe, batch),
            name,
            options,
            Precision(recipe.precision, None, device_of(device)),
        )
        content |= {"measured": measured, "bandwidth": bandwidth, "latency": latency}
        for row in rows:
            row |= times_of(
                row, measured, bandwidth, latency, samples, thor.param_groups[0]["update_interval"]
            )
        console.print(
            table(f"Predicted from {measured['device']}; all: {samples:,} samples", TIMES, rows)
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return rows


def table(
    title: str, shown: Mapping[str, tuple[str, float]], rows: Sequence[dict[str, Any]]
) -> Table:
    """Make a table of some numbers of rows."""
    cells = [
        [row["form"], f"{row['devices']:,}"]
        + [f"{row[key] / unit:,.2f}" for key, unit in shown.values()]
        for row in rows
    ]
    return columns(title, ["", "devices", *shown], cells)


def recipe_of(subject: str, words: Sequence[str]) -> Recipe:
    """Return the recipe that a subject names, or a recipe of a network."""
    if words or subject in recipe_names() or is_file_name(subject):
        return load_recipe(subject, words)
    if bert.is_known(subject):
        return Recipe(task="masked-lm", model=subject, data=Data(name="corpus"))
    return Recipe(model=subject, data=Data(name="image-folder"))


def row_of(optimizer: CurvatureOptimizer, form: str, devices: int, shards: int) -> dict[str, Any]:
    """Return what the device that has most keeps, sends and computes, in bytes.

    `shards` devices hold one copy of the weights.
    """
    layers = traffic.laid_out(optimizer.curvature.values(), devices, shards=shards)
    step = traffic.collectives_of_training(optimizer.model, devices, shards)
    refresh = traffic.collectives_of_refresh(layers, devices)
    shapes, owners = traffic.blocks_of(layers)
    return {
        "form": form,
        "devices": devices,
        **traffic.memory_of(optimizer, layers, shards),
        "sent": sum(each.sent for each in step),
        "sent_more": sum(each.sent for each in refresh),  # in addition on a refresh
        "rounds": sum(each.rounds for each in step),
        "rounds_more": sum(each.rounds for each in refresh),
        "most_work": imbalance(shapes, devices, owners),  # of the inversion, over the mean
    }


def times_of(
    row: Mapping[str, Any],
    measured: Mapping[str, Any],
    bandwidth: float,
    latency: float,
    samples: int,
    every: int | Callable[[int], int],
) -> dict[str, float]:
    """Return the seconds of a step, its network part, a step with a refresh, and of a training.

    The links have a bandwidth in GB/s, and a latency in microseconds; `every` is the interval of
    the refreshes.
    """
    network = row["rounds"] * 1e-6 * latency + row["sent"] / (1e9 * bandwidth)
    more = row["rounds_more"] * 1e-6 * latency + row["sent_more"] / (1e9 * bandwidth)
    step = measured["ordinary"] + network
    # The measured refresh contains what other devices will invert.
    others = measured["inverting"] * (1 - row["most_work"] / row["devices"])
    refresh = measured["refresh"] - others + network + more
    steps = -(-samples // (measured["batch"] * row["devices"]))
    refreshes = sum(1 / (every(i) if callable(every) else every) for i in range(steps))
    return {
        "step": step,
        "network": network,
        "refresh": refresh,
        "training": steps * step + refreshes * (refresh - step),
    }


def subject_of(word: str, recipe: Recipe, count: int) -> Subject:
    """Build a network, its loss, and a random batch, because times do not depend on the values."""
    if ".py:" in word:
        return load_subject(word, 0)
    torch.manual_seed(0)
    if recipe.task != "masked-lm":
        classes = recipe.classes or OF_DATA.get(recipe.data.name, CLASSES)
        model = build_model(recipe.model, recipe.data.image_shape[0], classes)
        batch = torch.randn(count, *recipe.data.image_shape), torch.randint(classes, (count,))
        return Subject(model, batch)
    text = recipe.data.text
    model = bert.build(
        recipe.model, VOCABULARY, text.length, pad=0, next_sentence=text.next_sentence
    )
    # Which tokens are scored makes no difference to the times.
    bert.scored_tokens(model, torch.arange(count * max(1, round(text.masked * text.length))))
    return Subject(
        model,
        {"input_ids": torch.randint(5, VOCABULARY, (count, text.length))},
        # takes as long as the cross entropies
        lambda output: sum(scores.log_softmax(-1).mean() for scores in output.values()),
    )


def measure(
    subject: Subject, name: str, options: Mapping[str, Any], precision: Precision
) -> dict[str, Any]:
    """Measure seconds of ordinary steps and refreshes in turn, and of inverting all blocks."""
    require(
        subject.batch is not None,
        "the function returned only a model, and its times are to be measured: return (model, "
        "(inputs, targets)) or (model, (inputs, targets), loss function)",
    )
    device, seconds = precision.device, []
    options = {**options, "lr": 1e-6, "update_interval": 2, **WHEN_MEASURED[name]}
    optimizer: Any = build_optimizer(name, subject.model.to(device), options)
    optimizer.grad_scaler = precision.scaler
    for _ in range(12):  # a refresh and an ordinary step in turn; the first two are a warm-up
        started = time.perf_counter()
        with precision.autocast():
            loss = loss_of(subject.model, subject.batch, subject.loss_fn, device)
        precision.backward(loss)
        precision.step(optimizer)
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
        optimizer.zero_grad()
    refresh, ordinary = statistics.median(seconds[2::2]), statistics.median(seconds[3::2])
    # A block of one number is inverted by a division, which takes no time.
    blocks = [
        (count, size)
        for count, size in traffic.blocks_of(optimizer.curvature.values())[0]
        if size > 1
    ]
    (inverting,) = inverse_seconds(blocks, (LARGEST,), dtype=torch.float32, device=device)
    return {
        "device": device_name(device),
        "batch": len(tree_leaves(subject.batch)[0]),
        "ordinary": ordinary,
        "refresh": refresh,
        "inverting": min(inverting, max(0.0, refresh - ordinary)),
    }
