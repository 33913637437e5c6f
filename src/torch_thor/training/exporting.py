"""The export of a trained network to the format of another library: `torch-thor export`."""

from collections.abc import Callable
from pathlib import Path

import torch

from torch_thor.files import whole_folder
from torch_thor.training.checkpoints.finding import ACCEPTED, find_checkpoints
from torch_thor.training.checkpoints.vocabulary import check_tokenizer
from torch_thor.training.config.stored_recipe import read_stored
from torch_thor.training.errors import require
from torch_thor.training.output_files import check_place, writing
from torch_thor.training.tasks.masked_lm import MaskedLM
from torch_thor.training.tasks.registry import TASKS

FORMATS = ("transformers",)


def export(path: Path, out: Path, form: str, say: Callable[[str], None], *, averaged: bool = False) -> None:
    """Write a trained network and its tokenizer in the format that `from_pretrained` of transformers reads.

    Args:
        path: A checkpoint, or a folder with the checkpoints of one optimizer.
        out: The folder to write. It must not exist yet.
        form: The name of the format, one of `FORMATS`.
        say: Called with a message for each damaged checkpoint that is skipped, and one when the export is complete.
        averaged: Whether to export the averaged weights.

    Raises:
        UserError: If the format is unknown, the path does not exist, the path contains no checkpoint or checkpoints of
            several optimizers, the format does not support the task, averaged weights are requested but missing,
            the corpus has another tokenizer than in the training, or the output folder exists or cannot be written.
    """
    require(form in FORMATS, f"--format {form} must be one of {', '.join(FORMATS)}")
    require(path.exists(), f"{path} does not exist: give {ACCEPTED}")
    found = find_checkpoints(path, say)
    require(bool(found), f"{path} is neither a run folder nor a checkpoint: give {ACCEPTED}")
    names = [saved.optimizer for saved in found]
    require(len(found) == 1, f"{path} holds the networks of {', '.join(names)}: give one, such as {path / names[0]}")
    (saved,) = found
    recipe = read_stored(saved.recipe_text).recipe
    kind = TASKS[recipe.task]
    require(
        kind is MaskedLM,
        f"{path} is of task={recipe.task}, which transformers has no form for: networks of masked-lm are exported",
    )
    require(not averaged or saved.has_average, f"{path} has no averaged weights: leave --averaged out")
    require(not out.exists(), f"--out {out} exists: give another folder")
    check_place(out)
    task = kind.open_saved(recipe, torch.device("cpu"), say, set())
    assert isinstance(task, MaskedLM)
    check_tokenizer(saved, task)
    model = task.build_model()
    saved.load_weights(model, averaged=averaged)
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out, "make room for it, then give the same command again"), whole_folder(out) as folder:
        model.save_pretrained(folder)  # type: ignore[operator]  # the model is a network of transformers
        task.tokenizer().save_pretrained(folder)
    say(f"{saved.optimizer}, step {saved.step}: written to {out}")
