"""The command `export`."""

from pathlib import Path
from typing import Annotated

import typer

from torch_thor.commands.messages import print_message

HELP = """Write a trained network in the format of another library.

A network of `task: masked-lm` becomes a folder for `from_pretrained` of transformers, with its tokenizer.

Example:

- `torch-thor export runs/bert-tiny/thor --out bert-tiny`, then `AutoModel.from_pretrained("bert-tiny")`
"""


def export(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A checkpoint, or an optimizer's folder in a run.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    form: Annotated[str, typer.Option("--format", help="The format; transformers is the only one.")] = "transformers",
    averaged: Annotated[bool, typer.Option("--averaged", help="Export the averaged weights.")] = False,
) -> None:
    """Write a trained network in the format of another library.

    Args:
        path: A checkpoint, or a folder with the checkpoints of one optimizer.
        out: The folder to write.
        form: The format.
        averaged: Whether to export the averaged weights.
    """
    from torch_thor.training.exporting import export as export_saved

    export_saved(path, out, form, print_message, averaged=averaged)
