"""The command `figures`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_thor.training.errors import UserError

HELP = """Reproduce the paper's figures on small data sets.

Writes NAME.json (the measured values), NAME.png and NAME.md into the folder. Values that were measured with the same
settings before are not measured again, so the same command continues an interrupted measurement.

Examples:

- `torch-thor figures curves --data digits` trains on handwritten digits, in a few minutes

- `torch-thor figures batch-sizes --batch-sizes 64,128,256 --epochs 1`

- `torch-thor figures all --redraw` draws all figures from the measured values, without training
"""


def figures(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The name of a figure, or all.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="A recipe: fashion-mnist (the default), digits or a YAML file.", show_default=False
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the training set.")] = None,
    eval_interval: Annotated[
        int | None, typer.Option("--eval-interval", help="Steps between evaluations, at the recipe's batch size.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Seeds, one training each, such as 0,1,2.")] = None,
    batch_sizes: Annotated[str | None, typer.Option("--batch-sizes", help="Batch sizes, such as 64,128,256.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model of split-dim: a name, or FILE.py:FUNCTION.")
    ] = None,
    pixels: Annotated[int | None, typer.Option("--pixels", help="Height and width of the images of split-dim.")] = None,
    device: Annotated[
        str, typer.Option("--device", help="The device: cpu, cuda, ..., or auto for a GPU if there is one.")
    ] = "auto",
    out: Annotated[Path, typer.Option("--out", help="The folder of the files.")] = Path("runs/figures"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure again and replace existing values.")] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the values that exist, without measuring.")] = False,
    list_figures: Annotated[bool, typer.Option("--list", help="List the figures instead of making them.")] = False,
) -> None:
    """Reproduce the paper's figures on small data sets.

    Args:
        name: The name of a figure, or all.
        data: A recipe.
        epochs: Passes over the training set.
        eval_interval: Steps between evaluations.
        seeds: Seeds, separated by commas.
        batch_sizes: Batch sizes, separated by commas.
        model: The model of the figure split-dim.
        pixels: Height and width of the images of the figure split-dim.
        device: The device to measure on.
        out: The folder of the files.
        overwrite: Whether to measure again.
        redraw: Whether to draw the values that exist, without measuring.
        list_figures: Whether to list the figures instead.

    Raises:
        UserError: If no figure is named, or an option is wrong.
    """
    from torch_thor.bench.figures import FIGURES, Options, figure_table, make_figures, numbers

    if list_figures:
        Console().print(figure_table())
        return
    if name is None:
        raise UserError(f"name a figure ({', '.join(FIGURES)}) or all; --list describes them")
    options = Options(
        data=data,
        epochs=epochs,
        eval_interval=eval_interval,
        seeds=numbers("--seeds", seeds),
        batch_sizes=numbers("--batch-sizes", batch_sizes),
        model=model,
        pixels=pixels,
    )
    make_figures(name, out, Console(), options, device=device, overwrite=overwrite, redraw=redraw)
