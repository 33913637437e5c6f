"""A trained network as another library reads it: `torch-thor export`."""

from collections.abc import Callable
from pathlib import Path

import torch

from torch_thor.files import whole_folder
from torch_thor.training.checkpoints.finding import ACCEPTED, find_checkpoints
from torch_thor.training.config.stored_recipe import read_stored
from torch_thor.training.errors import require
from torch_thor.training.output_files import check_place, writing
from torch_thor.training.tasks.masked_lm import MaskedLM
from torch_thor.training.tasks.registry import TASKS

FORMATS = ("transformers",)


def export(path: Path, out: Path, form: str, say: Callable[[str], None], *, averaged: bool = False) -> None:
    """Write a trained network, and its tokenizer, as `from_pretrained` of transformers reads them.

    Args:
        path: A checkpoint, or what holds the checkpoints of one optimizer.
        out: The folder to write; it must not exist yet.
        form: One of `FORMATS`.
        say: Called with a line for each damaged checkpoint that is skipped.
        averaged: Whether to take the averaged weights.

    Raises:
        UserError: If the path holds no checkpoint or those of several optimizers, the task has no such form, there are
            no averaged weights, or the folder exists.
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
    model = task.build_model()
    saved.load_weights(model, averaged=averaged)
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out, "make room for it, then give the same command again"), whole_folder(out) as folder:
        model.save_pretrained(folder)  # type: ignore[operator]  # a network of transformers
        task.tokenizer().save_pretrained(folder)
    say(f"{saved.optimizer}, step {saved.step}: written to {out}")
