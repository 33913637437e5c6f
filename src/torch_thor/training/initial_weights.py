"""Weights to start a training from, or to evaluate: of a safetensors file or of a checkpoint."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from torch_thor.capture.patterns import matches
from torch_thor.errors import explaining, require
from torch_thor.files import sha256
from torch_thor.training.checkpoint import (
    AVERAGED,
    MANIFEST,
    PREFIX,
    WEIGHTS,
    Checkpoint,
    by_first_name,
    misfits,
    newest,
    open_checkpoint,
)
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipe_model import Recipe, path_of
from torch_thor.training.tasks.task import Task

ACCEPTED = "a run folder, a checkpoint or a folder of checkpoints"  # for error messages
# buffers of BatchNorm that many files lack, and that are not needed
COUNTERS = "num_batches_tracked"


def find_checkpoints(path: Path, say: Callable[[str], None]) -> list[Checkpoint]:
    """Open a path's checkpoint, or each optimizer's newest undamaged one in a run folder."""
    require(path.exists(), f"{path} does not exist: give {ACCEPTED}")
    if path.is_dir() and (path.name.startswith(PREFIX) or (path / MANIFEST).exists()):
        return [open_checkpoint(path)]
    here = next(
        (folder for folder in (path, path / "checkpoints") if any(folder.glob(f"{PREFIX}*"))), None
    )
    run = RunFolder(path)
    require(here is not None or run.is_run(), f"{path} is no checkpoint: give {ACCEPTED}")
    stored = run.stored() if here is None else None
    named = [here] if stored is None else [run.checkpoints(name) for name in stored.optimizer]
    checkpoints = [
        saved
        for folder in named
        if folder is not None and (saved := newest(folder, say)) is not None
    ]
    require(
        bool(checkpoints), f"{path} contains no checkpoint yet: continue the training with --resume"
    )
    return checkpoints


def the_checkpoint(path: Path, said: str, say: Callable[[str], None]) -> Checkpoint:
    """Open the only checkpoint that a path stands for; a run with several optimizers is refused."""
    checkpoints = find_checkpoints(path, say)
    names = [saved.optimizer for saved in checkpoints]
    require(
        len(checkpoints) == 1,
        f"{said} holds the networks of {', '.join(names)}: give one, such as {path / names[0]}",
    )
    return checkpoints[0]


def checksum(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """Return the recipe with its starting weights' checksum, if it has any and no checksum yet."""
    if recipe.weights is None or recipe.weights_sha256 is not None:
        return recipe
    return recipe.model_copy(update={"weights_sha256": _find(recipe.weights, say)[2]})


def load(model: nn.Module, recipe: Recipe, task: Task) -> None:
    """Load a recipe's `weights`, but for `weights_except`, into its network of random weights."""
    assert recipe.weights is not None
    # Damaged checkpoints are not reported again, because `checksum` has done it.
    path, saved, digest = _find(recipe.weights, lambda _: None)
    require(
        digest == (recipe.weights_sha256 or digest),
        f"weights={recipe.weights} is not the file that the recipe names: its SHA-256 is {digest}, "
        f"not weights_sha256={recipe.weights_sha256}; give the original file, or start another run "
        "with --out",
    )
    with explaining(
        (SafetensorError, OSError),
        lambda error: (
            f"weights={recipe.weights} is not a safetensors file ({error}): write one with "
            "safetensors.torch.save_file"
        ),
    ):
        given = load_file(path)
    weights, left_out = model.state_dict(), set()
    for pattern in recipe.weights_except:
        matched = {name for name in (*weights, *given) if matches(pattern, name)}
        require(
            bool(matched),
            f"weights_except={pattern} matches no weight of the file or of the network; these have "
            f"{', '.join([*weights][:3])} and others",
        )
        left_out |= matched
    # safetensors stores a shared weight under only one of its names
    given, weights = (
        by_first_name(
            model, {name: tensor for name, tensor in tensors.items() if name not in left_out}
        )
        for tensors in (given, weights)
    )
    needed = {
        name: tensor
        for name, tensor in weights.items()
        if name in given or not name.endswith(COUNTERS)
    }
    faults = misfits(given, needed)
    require(
        not faults,
        f"weights={recipe.weights} do not fit model={recipe.model} ({faults}): choose the network "
        "that they belong to, or exclude weights, such as those of the head, with "
        "weights_except=[NAME]",
    )
    embedding = getattr(model, "get_input_embeddings", None)  # of transformers
    if saved is not None and (
        embedding is None
        or any(weights[name].data_ptr() == embedding().weight.data_ptr() for name in given)
    ):
        saved.check_tokenizer(task)
    model.load_state_dict(given, strict=False)  # the names have been compared


def _find(word: str, say: Callable[[str], None]) -> tuple[Path, Checkpoint | None, str]:
    """Find the weights file, the checkpoint that it belongs to, if any, and its checksum."""
    path, saved = path_of("weights", word), None
    require(path.exists(), f"weights={word} does not exist: give a safetensors file, {ACCEPTED}")
    if path.is_dir():
        saved = the_checkpoint(path, f"weights={word}", say)
        path = saved.path / WEIGHTS
    elif path.name in (WEIGHTS, AVERAGED) and (path.parent / MANIFEST).exists():
        saved = open_checkpoint(path.parent)
    with explaining(
        OSError,
        lambda error: f"weights={word} cannot be read ({error.strerror}): choose another file",
    ):
        return path, saved, sha256(path)
