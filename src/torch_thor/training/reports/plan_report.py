"""The report of `torch-thor plan`: what THOR's curvature takes and sends on a number of processes, without running."""

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from torch_thor import THOR, __version__
from torch_thor.curvature import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.distributed.ownership import deal_out, imbalance
from torch_thor.distributed.traffic import blocks_of, collectives_of_refresh
from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.models import masked_lm
from torch_thor.training.output_files import check_place, write_whole
from torch_thor.training.printing import printer
from torch_thor.training.reports.split_subject import load_subject

NUMBERS_FILE = "plan.json"
VOCABULARY = 30522  # of a BERT that is given by its size, as in the published ones
MEGABYTE = 10**6


@dataclass(frozen=True)
class Curvature:
    """What the curvature of a model takes in memory, on every process.

    Args:
        layers: Number of preconditioned layers.
        parameters: Number of trained elements of the model.
        gradient_bytes: Size of the gradients.
        state_bytes: Size of the factors and their inverses.
        statistics_bytes: Size of the sums over rows, which exist on steps that refresh.
    """

    layers: int
    parameters: int
    gradient_bytes: int
    state_bytes: int
    statistics_bytes: int


@dataclass(frozen=True)
class Share:
    """What one process does and sends on a refresh in which all layers take new factors.

    Args:
        processes: Number of processes.
        blocks: The largest number of blocks that a process inverts.
        imbalance: The most work of a process over the mean.
        sent: Bytes that a process sends on a refresh, with rings.
        sent_unsplit: The same with factors that are not split.
        gradients_sent: Bytes that a process sends for the gradients on every step, with a ring.
    """

    processes: int
    blocks: int
    imbalance: float
    sent: int
    sent_unsplit: int
    gradients_sent: int


def curvature_of(model: nn.Module, layers: Iterable[LayerCurvature]) -> Curvature:
    """Compute the sizes of factors, inverses and statistics.

    Args:
        model: The model.
        layers: Its preconditioned layers.

    Returns:
        The sizes.
    """
    layers = list(layers)
    statistics = sum(one.dtype.itemsize * one.shape[0] * one.shape[1] ** 2 for one in blocks_of(layers))
    state = 0
    by_rows: set[int] = set()  # weights whose layers share the factor of their rows
    for layer in layers:
        size, weight = factor_dtype(layer.weight.dtype).itemsize, id(layer.weight)
        for key, shape in layer.stored.shapes().items():
            if key.removesuffix("_inverse") != layer.stored.side_by_rows or weight not in by_rows:
                state += size * math.prod(shape)
        by_rows.add(weight)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Curvature(
        layers=len(layers),
        parameters=sum(p.numel() for p in trained),
        gradient_bytes=sum(p.nbytes for p in trained),
        state_bytes=state,
        statistics_bytes=statistics,
    )


def share_of(
    layers: Iterable[LayerCurvature], unsplit: Iterable[LayerCurvature], gradient_bytes: int, processes: int
) -> Share:
    """Compute what one process does and sends.

    Args:
        layers: The preconditioned layers.
        unsplit: Those of the same model, with factors that are not split.
        gradient_bytes: Size of the gradients.
        processes: Number of processes.

    Returns:
        The share.
    """
    layers = list(layers)
    shapes = tuple(one.shape for one in blocks_of(layers))
    blocks = [0] * processes
    for of_processes in deal_out(shapes, processes):
        for i in range(processes):
            blocks[i] += of_processes[i + 1] - of_processes[i]
    sent, sent_unsplit = (
        sum(one.sent(processes) for one in collectives_of_refresh(chosen, processes)) if processes > 1 else 0
        for chosen in (layers, unsplit)
    )
    ring = 2 * gradient_bytes * (processes - 1) // processes
    return Share(processes, max(blocks), imbalance(shapes, processes), sent, sent_unsplit, ring)


def report_plan(
    word: str, world_sizes: Sequence[int], console: Console, *, split_dim: int, scaling: str | None, out: Path | None
) -> list[Share]:
    """Compute, print and write the plan of a model.

    Args:
        word: The model: a torchvision or timm name, a size of BERT, a transformers `config.json`, or
            `FILE.py:FUNCTION`. It is built without memory for its weights.
        world_sizes: Numbers of processes.
        console: Where the table is printed.
        split_dim: THOR's block size.
        scaling: THOR's `scaling`, `None` or `"spectral"`.
        out: The folder of `plan.json`; `None` writes no file.

    Returns:
        One share for each number of processes.

    Raises:
        UserError: If the model cannot be built, or THOR preconditions none of its layers.
    """
    if out is not None:
        check_place(out)
    model = _build(word)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of little that is preconditioned: the table tells
        try:
            layers, unsplit = (
                list(THOR(model, split_dim=size, scaling=scaling).curvature.values()) for size in (split_dim, None)
            )
        except ValueError as error:
            raise UserError(f"{word}: {first_line(error)}") from error
    curvature = curvature_of(model, layers)
    shares = [share_of(layers, unsplit, curvature.gradient_bytes, processes) for processes in world_sizes]
    say = printer(console)
    say(
        f"{word}: {curvature.layers} preconditioned layers, {curvature.parameters / MEGABYTE:.1f} M parameters. On "
        f"every process: factors and inverses {_megabytes(curvature.state_bytes)}, statistics on refresh steps "
        f"{_megabytes(curvature.statistics_bytes)}, gradients {_megabytes(curvature.gradient_bytes)}"
    )
    console.print(plan_table(shares))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        numbers = {
            "model": word,
            "split_dim": split_dim,
            "scaling": scaling,
            "torch_thor": __version__,
            "curvature": asdict(curvature),
            "shares": [asdict(share) for share in shares],
        }
        write_whole(out / NUMBERS_FILE, json.dumps(numbers, indent=1) + "\n", "choose another folder with --out")
        say(f"Numbers are in {out}")
    return shares


def plan_table(shares: Iterable[Share]) -> Table:
    """Make the table of a plan.

    Args:
        shares: What one process does and sends, for each number of processes.

    Returns:
        A table with a row per number of processes.
    """
    table = Table(title="One process, data-parallel (DDP)", title_justify="left")
    headings = ("processes", "blocks to invert", "most work / mean", "sent per refresh", "with unsplit factors")
    for heading in (*headings, "gradients sent per step"):
        table.add_column(heading, justify="right")
    for share in shares:
        sent = (_megabytes(size) for size in (share.sent, share.sent_unsplit, share.gradients_sent))
        table.add_row(f"{share.processes:,}", f"{share.blocks:,}", f"{share.imbalance:.2f}", *sent)
    return table


def _build(word: str) -> nn.Module:
    with torch.device("meta"):
        if masked_lm.is_known(word):
            return masked_lm.build(word, VOCABULARY, length=128, pad=0)
        model = load_subject(word, seed=0).model
    require(any(p.requires_grad for p in model.parameters()), f"{word} has no parameters to train")
    return model


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.1f} MB"
