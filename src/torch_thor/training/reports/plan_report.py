"""The report of `torch-thor plan`: what THOR's curvature takes and sends on a number of processes, without running."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from torch_thor import __version__
from torch_thor.curvature import LayerCurvature
from torch_thor.training.engine.parallel import resolve_device
from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.models import masked_lm
from torch_thor.training.output_files import check_place, write_whole, writing
from torch_thor.training.printing import printer
from torch_thor.training.reports.plan_costs import Costs, read_costs, write_costs
from torch_thor.training.reports.plan_divided import divided_share
from torch_thor.training.reports.plan_division import Share, curvature_of, share_of
from torch_thor.training.reports.plan_measure import KINDS, measure_costs
from torch_thor.training.reports.plan_network import parse_interconnect
from torch_thor.training.reports.plan_plot import draw_times
from torch_thor.training.reports.plan_sample import VOCABULARY, make_sample
from torch_thor.training.reports.plan_sharded import ShardedShare, shard_layers, sharded_share
from torch_thor.training.reports.plan_tables import divided_table, megabytes, plan_table, sharded_table, times_table
from torch_thor.training.reports.plan_times import Times, Workload, predict
from torch_thor.training.reports.split_subject import load_subject

NUMBERS_FILE, PICTURE_FILE = "plan.json", "plan.png"
MEGABYTE = 10**6


@dataclass(frozen=True)
class PlanOptions:
    """What is planned beside the model and the numbers of processes.

    Args:
        split_dim: THOR's block size.
        optimizer: `thor` or `thor-muon`.
        sharded: Whether to plan for sharded parameters (FSDP2) as well.
        batch: Number of samples of a step over all processes; `None` predicts no times.
        interconnect: How the devices are connected, as `parse_interconnect` reads it.
        samples: Number of samples of an epoch; `None` predicts no epochs.
        interval: Steps from one refresh to the next.
        costs: The file of costs that were measured before; `None` measures them on this device if they are needed.
        save_costs: The file in which measured costs are written; `None` writes none.
        local_batch: Number of samples that costs are measured with.
        device: The device that costs are measured on: `auto` or its name.
        pixels: Height and width of images.
        length: Tokens of a text.
        out: The folder of `plan.json` and `plan.png`; `None` writes no file.
    """

    split_dim: int = 128
    optimizer: str = "thor"
    sharded: bool = False
    batch: int | None = None
    interconnect: str = "nvlink+400g"
    samples: int | None = None
    interval: int = 100
    costs: Path | None = None
    save_costs: Path | None = None
    local_batch: int = 8
    device: str = "auto"
    pixels: int = 224
    length: int = 128
    out: Path | None = None


def report_plan(word: str, world_sizes: Sequence[int], console: Console, options: PlanOptions) -> list[Share]:
    """Compute, print and write the plan of a model.

    Args:
        word: The model: a torchvision or timm name, a size of BERT, a transformers `config.json`, or
            `FILE.py:FUNCTION`. It is built without memory for its weights, unless costs are measured.
        world_sizes: Numbers of processes.
        console: Where the tables are printed.
        options: What is planned.

    Returns:
        One share for each number of processes.

    Raises:
        UserError: If the model cannot be built or measured, THOR preconditions none of its layers, or an option does
            not fit.
    """
    require(
        options.optimizer in KINDS,
        f"--optimizer={options.optimizer}: must be {' or '.join(KINDS)}; others have no curvature to plan for",
    )
    network = parse_interconnect(options.interconnect)
    work = None if options.batch is None else Workload(options.batch, options.interval, options.samples)
    if work is not None:
        work.local(max(world_sizes))
    if options.out is not None:
        check_place(options.out)
    model = _build(word)
    layers, unsplit = (_layers(word, model, size, options.optimizer) for size in (options.split_dim, None))
    curvature = curvature_of(model, layers)
    shares = [share_of(layers, unsplit, curvature.gradient_bytes, processes) for processes in world_sizes]
    say = printer(console)
    say(
        f"{word}: {curvature.layers} preconditioned layers, {curvature.parameters / MEGABYTE:.1f} M parameters. On "
        f"every process: factors and inverses {megabytes(curvature.state_bytes)}, statistics on refresh steps "
        f"{megabytes(curvature.statistics_bytes)}, gradients {megabytes(curvature.gradient_bytes)}"
    )
    console.print(plan_table(shares))
    divided = [divided_share(model, layers, processes) for processes in world_sizes]
    console.print(divided_table(divided))
    costs = _costs(word, options, say)
    times: list[Times] = []
    if costs is not None and work is not None:
        for n in world_sizes:
            times.append(predict(layers, curvature.gradient_bytes, n, costs, network, work))
    sharded: list[ShardedShare] = []
    if options.sharded:
        for n in world_sizes:
            own = shard_layers(layers, n)
            sharded.append(sharded_share(model, own, curvature.gradient_bytes, n))
            if costs is not None and work is not None:
                times.append(predict(own, curvature.gradient_bytes, n, costs, network, work, sharded=True))
        console.print(sharded_table(sharded))
    if times and costs is not None:
        console.print(times_table(times))
        say(
            f"Predicted, not measured: {costs.sample} on {costs.machine['device']}, {network.word}, batch "
            f"{options.batch:,}, all layers refreshed every {options.interval} steps; nothing overlaps"
        )
    if options.out is not None:
        numbers = {
            "model": word,
            "split_dim": options.split_dim,
            "optimizer": options.optimizer,
            "torch_thor": __version__,
            "curvature": asdict(curvature),
            "shares": [asdict(share) for share in shares],
            "divided": [asdict(share) for share in divided],
            "sharded": [asdict(share) for share in sharded],
            "interconnect": asdict(network),
            "workload": None if work is None else asdict(work),
            "times": [asdict(one) for one in times],
            "costs": None if costs is None else asdict(costs),
        }
        _write(word, options.out, numbers, times)
        say(f"Numbers are in {options.out}")
    return shares


def _layers(word: str, model: nn.Module, split_dim: int | None, optimizer: str) -> list[LayerCurvature]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of little that is preconditioned: the table tells
        try:
            return list(KINDS[optimizer](model, split_dim=split_dim).curvature.values())
        except ValueError as error:
            raise UserError(f"{word}: {first_line(error)}") from error


def _costs(word: str, options: PlanOptions, say: Callable[[str], None]) -> Costs | None:
    """Read costs, or measure them if they are needed."""
    if options.costs is not None:
        costs = read_costs(options.costs)
        wanted = {"model": word, "split_dim": options.split_dim, "optimizer": options.optimizer}
        for name, value in wanted.items():
            found = getattr(costs, name)
            require(found == value, f"--costs {options.costs}: measured with {name}={found}, and this plan has {value}")
        return costs
    if options.batch is None and options.save_costs is None:
        return None
    if options.save_costs is not None:
        check_place(options.save_costs.parent, "--save-costs")
    device = resolve_device(options.device)
    say(f"Measuring the costs of {word} on {device} with {options.local_batch} samples ...")
    sample = make_sample(word, device, count=options.local_batch, pixels=options.pixels, length=options.length)
    costs = measure_costs(
        word,
        sample,
        device,
        local_batch=options.local_batch,
        split_dim=options.split_dim,
        optimizer=options.optimizer,
    )
    if options.save_costs is not None:
        write_costs(costs, options.save_costs)
        say(f"Costs are in {options.save_costs}")
    return costs


def _write(word: str, out: Path, numbers: dict[str, Any], times: Sequence[Times]) -> None:
    remedy = "choose another folder with --out"
    with writing(out, remedy):
        out.mkdir(parents=True, exist_ok=True)
    write_whole(out / NUMBERS_FILE, json.dumps(numbers, indent=1) + "\n", remedy)
    if times:
        with writing(out / PICTURE_FILE, remedy):
            draw_times(word, times, out / PICTURE_FILE)


def _build(word: str) -> nn.Module:
    with torch.device("meta"):
        if masked_lm.is_known(word):
            return masked_lm.build(word, VOCABULARY, length=128, pad=0)
        model = load_subject(word, seed=0).model
    require(any(p.requires_grad for p in model.parameters()), f"{word} has no parameters to train")
    return model
