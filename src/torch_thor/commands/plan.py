"""The command `plan`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

HELP = """Compute what THOR takes and sends on many processes, before renting them.

Prints the memory of the curvature, how evenly the inversion of the blocks is divided, and the bytes that each process
sends on a refresh and for the gradients. Nothing is trained: the model is built without memory for its weights.

Examples:

- `torch-thor plan resnet50 --world-size 8,64,256`

- `torch-thor plan bert-large --split-dim 64`

- `torch-thor plan mine.py:build`, for a function that returns a model
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
    spectral: Annotated[
        bool, typer.Option("--spectral", help='Plan for the scale-free step, scaling="spectral".')
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="A folder for plan.json (default: none).", show_default=False)
    ] = None,
) -> None:
    """Compute what THOR takes and sends on many processes.

    Args:
        model: A torchvision or timm name, a size of BERT, a transformers configuration, or a function in a file.
        world_size: Numbers of processes, separated by commas.
        split_dim: Block size of the factors.
        spectral: Whether to plan for the scale-free step.
        out: The folder of `plan.json`; `None` writes no file.

    Raises:
        UserError: If a number of processes is not a whole number of at least 1, or the model cannot be built.
    """
    from torch_thor.training.errors import UserError
    from torch_thor.training.reports.plan_report import report_plan

    words = [word.strip() for word in world_size.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--world-size={world_size}: must be whole numbers of at least 1, separated by commas")
    scaling = "spectral" if spectral else None
    report_plan(model, [int(word) for word in words], Console(), split_dim=split_dim, scaling=scaling, out=out)
