"""The command `plan`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

HELP = """Compute what THOR takes and sends on many processes, and predict times, before renting them.

Prints the memory of the curvature, how evenly the inversion of the blocks is divided, and the bytes that each process
sends on a refresh and for the gradients. With `--batch` it predicts the times of steps and epochs as well, from costs
that are measured on this device (or read with `--costs`) and from `--interconnect`.

Examples:

- `torch-thor plan resnet50 --world-size 8,64,256`

- `torch-thor plan bert-large --split-dim 64 --fsdp`

- `torch-thor plan mine.py:build`, for a function that returns a model

- `torch-thor plan resnet50 --save-costs costs.json`, then on any machine `torch-thor plan resnet50 --costs costs.json
--batch 8192 --interconnect nvlink+400g --samples 1281167 --out runs/plan`

Links of `--interconnect`, in bytes that one device sends in a second, and the latency of one round of a ring:

- `pcie4`: 31.5 GB/s, 5.7 us; `pcie5`: 63 GB/s, 5.7 us

- `nvlink3`: 300 GB/s, 3.4 us; `nvlink`: 450 GB/s, 3.4 us

- `100g`: 12.5 GB/s, 14 us; `200g`: 25 GB/s, 14 us; `400g`: 50 GB/s, 14 us

- any other as `12.5GB/s@5us`; `INSIDE+BETWEEN:N` for nodes of N devices (default: 8)
"""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A torchvision or timm name, a size of BERT, a config.json, or FILE.py:FUNCTION."
        ),
    ],
    world_size: Annotated[
        str, typer.Option("--world-size", help="Numbers of processes, separated by commas.")
    ] = "1,2,4,8,16,32,64,128,256,512,1024",
    split_dim: Annotated[int, typer.Option("--split-dim", min=1, help="Block size of the factors.")] = 128,
    optimizer: Annotated[str, typer.Option("--optimizer", help="thor, or thor-muon.")] = "thor",
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Plan for sharded parameters (FSDP2) as well.")] = False,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            help="Samples of a step over all processes (default: no times are predicted).",
            show_default=False,
        ),
    ] = None,
    interconnect: Annotated[
        str, typer.Option("--interconnect", help="LINK, or INSIDE+BETWEEN for links inside and between nodes.")
    ] = "nvlink+400g",
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, help="Samples of an epoch (default: no epochs).", show_default=False),
    ] = None,
    interval: Annotated[int, typer.Option("--interval", min=1, help="Steps from one refresh to the next.")] = 100,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="Costs that were measured before (default: measure).", show_default=False),
    ] = None,
    save_costs: Annotated[
        Path | None, typer.Option("--save-costs", help="Measure costs, and write them here.", show_default=False)
    ] = None,
    local_batch: Annotated[int, typer.Option("--local-batch", min=1, help="Samples to measure costs with.")] = 8,
    device: Annotated[
        str,
        typer.Option("--device", help="The device to measure on: cpu, cuda, ..., or auto for a GPU if there is one."),
    ] = "auto",
    pixels: Annotated[int, typer.Option("--pixels", min=1, help="Height and width of images.")] = 224,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a text.")] = 128,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A folder for plan.json and plan.png (default: none).", show_default=False),
    ] = None,
) -> None:
    """Compute what THOR takes and sends on many processes, and predict times.

    Args:
        model: A torchvision or timm name, a size of BERT, a transformers configuration, or a function in a file.
        world_size: Numbers of processes, separated by commas.
        split_dim: Block size of the factors.
        optimizer: `thor` or `thor-muon`.
        fsdp: Whether to plan for sharded parameters as well.
        batch: Samples of a step over all processes; `None` predicts no times.
        interconnect: How the devices are connected.
        samples: Samples of an epoch; `None` predicts no epochs.
        interval: Steps from one refresh to the next.
        costs: The file of costs that were measured before; `None` measures them if they are needed.
        save_costs: The file for measured costs; `None` writes none.
        local_batch: Samples to measure costs with.
        device: The device to measure on.
        pixels: Height and width of images.
        length: Tokens of a text.
        out: The folder of `plan.json` and `plan.png`; `None` writes no file.

    Raises:
        UserError: If an option is not valid, or the model cannot be built or measured.
    """
    from torch_thor.training.errors import UserError
    from torch_thor.training.reports.plan_report import PlanOptions, report_plan

    words = [word.strip() for word in world_size.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--world-size={world_size}: must be whole numbers of at least 1, separated by commas")
    options = PlanOptions(
        split_dim=split_dim,
        optimizer=optimizer,
        sharded=fsdp,
        batch=batch,
        interconnect=interconnect,
        samples=samples,
        interval=interval,
        costs=costs,
        save_costs=save_costs,
        local_batch=local_batch,
        device=device,
        pixels=pixels,
        length=length,
        out=out,
    )
    report_plan(model, [int(word) for word in words], Console(), options)
