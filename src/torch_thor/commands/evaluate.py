"""The command `eval`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from torch_thor.commands.messages import is_first_rank, print_message
from torch_thor.training.printing import cell

HELP = """Evaluate a trained network on the test set and print its metrics, such as top-1 and top-5 accuracy.

For a run folder, the newest undamaged checkpoint of each of its optimizers is evaluated. The path
`RUN/OPTIMIZER/checkpoints/best` stands for the best checkpoint. An image folder needs to contain only the evaluation
images. Under `torchrun` the processes share the data.

Examples:

- `torch-thor eval runs/digits`

- `torch-thor eval runs/mine data.root=/moved/images data.workers.count=8 --json`
"""


def evaluate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT", help="A run folder, a folder of checkpoints in it, or one checkpoint."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Keys to override: device, batch_size, threads, and the keys inside data."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list with all metrics in full precision instead of a table.")
    ] = False,
) -> None:
    """Evaluate a trained network on the test set and print its metrics.

    Args:
        path: A run folder or a checkpoint.
        words: The overrides.
        as_json: Whether to print JSON instead of a table.
    """
    from torch_thor.training.evaluating import evaluate_saved

    scores = evaluate_saved(path, words or [], print_message)
    if not is_first_rank():
        return
    if as_json:
        rows = [
            {
                "optimizer": one.optimizer,
                "averaged": one.averaged,
                "step": one.step,
                "path": str(one.path),
                **one.score.metrics,
                one.unit: one.score.terms,
            }
            for one in scores
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = [metric for metric in scores[0].metrics if metric.primary or metric.name != "loss"]
    table = Table("optimizer", "step", *(metric.title for metric in shown))
    for one in scores:
        name = f"{one.optimizer}, averaged weights" if one.averaged else one.optimizer
        table.add_row(cell(name), str(one.step), *(metric.text(one.score.metrics[metric.name]) for metric in shown))
    Console().print(table)
