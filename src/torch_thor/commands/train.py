"""The command `train`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torch_thor.training.errors import StoppedError, UserError
from torch_thor.training.printing import cell

HELP = """Train a recipe and compare its optimizers.

Writes curves, metrics, the recipe of the run and checkpoints into the run folder, and prints a table of the results.
Ctrl-C saves a checkpoint; `--resume` continues from it, bit for bit.

Examples:

- `torch-thor train` trains with THOR and with SGD on handwritten digits, in less than a minute

- `torch-thor train fashion-mnist optimizer=thor lr=0.1`

- `torch-thor train digits optimizer=thor,adamw epochs=3 schedule.kind=linear --out runs/mine`
"""


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="The name of a recipe or a YAML file (default: digits), then keys to override.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder (default: runs/RECIPE).", show_default=False)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest undamaged checkpoint, with the settings of the run in the folder.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the folder and start anew.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Profile a few steps, one refresh among them, and write a trace to OPTIMIZER/profile/."
        ),
    ] = False,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List the recipes and their keys instead of training.")
    ] = False,
) -> None:
    """Train a recipe and compare its optimizers.

    Args:
        words: The recipe and the overrides.
        out: The run folder.
        resume: Whether to continue the run in the folder.
        overwrite: Whether to delete the run in the folder.
        profile: Whether to profile a few steps of each optimizer.
        list_recipes: Whether to list the recipes and their keys instead.

    Raises:
        UserError: If more than one recipe is named, or the run cannot be started.
        StoppedError: If a signal stopped the training.
    """
    from torch_thor.training.checkpoints.run_folder import RunFolder
    from torch_thor.training.config.recipe_files import DEFAULT_RECIPE, load_recipe, name_of
    from torch_thor.training.config.recipe_text import override
    from torch_thor.training.experiment import run_recipe

    if list_recipes:
        _print_recipes()
        return
    names = [word for word in words or [] if "=" not in word]
    if len(names) > 1:
        raise UserError(f"'{' '.join(names)}' names more than one recipe: give one, then key=value words")
    name = names[0] if names else DEFAULT_RECIPE
    folder = RunFolder(out or Path("runs") / Path(name).stem)
    overrides = [word for word in words or [] if "=" in word]
    stored = folder.stored_recipe() if resume else None
    if stored is not None and (not names or name_of(name) == stored.name):
        recipe = override(stored, overrides)  # keys that are not overridden keep the values of the run
    else:
        recipe = load_recipe(name, overrides)
    try:
        run_recipe(recipe, folder, Console(), resume=resume, overwrite=overwrite, profile=profile)
    except StoppedError as stop:
        command = ["torch-thor", "train", *names, "--resume", *(["--out", str(out)] if out else [])]
        raise StoppedError(stop.step, shlex.join(command)) from stop


def _print_recipes() -> None:
    from torch_thor.training.config.keys import key_tables
    from torch_thor.training.config.recipe_files import recipe_list

    table = Table("recipe", "about", "should reach", show_lines=True)
    for row in recipe_list():
        table.add_row(*map(cell, row))
    Console().print(table)
    for keys in key_tables():
        Console().print(keys)
