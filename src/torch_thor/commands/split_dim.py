"""The command `split-dim`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

HELP = """Choose THOR's split dimension for a model on this device.

Cuts every factor into blocks of 1, 16, 32, ... rows, measures the loss of spectral norm and the time to invert the
blocks, and chooses the block size where the two curves cross. Prints tables, and writes `split_dim.png` and
`split_dim.json`.

Examples:

- `torch-thor split-dim resnet50`

- `torch-thor split-dim timm:vit_tiny_patch16_224 --device cuda --data photographs/`

- `torch-thor split-dim mine.py:build`, for a function that returns a model, `(model, sample_batch)` or
`(model, sample_batch, loss_fn)`
"""


def split_dim(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A torchvision or timm name, or FILE.py:FUNCTION.")],
    device: Annotated[
        str, typer.Option("--device", help="The device: cpu, cuda, ..., or auto for a GPU if there is one.")
    ] = "auto",
    batch: Annotated[int, typer.Option("--batch", help="Number of sample images.")] = 32,
    pixels: Annotated[int, typer.Option("--pixels", help="Height and width of the sample images.")] = 224,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="A folder of images (default: two photographs).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights and the crops.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder of the results (default: runs/split-dim-MODEL).", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing results.")] = False,
) -> None:
    """Choose THOR's split dimension for a model on this device.

    Args:
        model: A torchvision or timm name, or a function in a file.
        device: The device to measure on.
        batch: Number of sample images.
        pixels: Height and width of the sample images.
        data: A folder of images; `None` uses two photographs.
        seed: Seed of the weights and the crops.
        out: The folder of the results.
        overwrite: Whether to replace existing results.
    """
    from torch_thor.training.reports.split_report import report_split_dim

    folder = out or Path("runs") / f"split-dim-{Path(model).name.replace(':', '-')}"
    report_split_dim(
        model,
        folder,
        Console(),
        device=device,
        batch=batch,
        pixels=pixels,
        data=data,
        seed=seed,
        overwrite=overwrite,
    )
