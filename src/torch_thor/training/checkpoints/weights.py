"""The initial weights of a training: those of a safetensors file, or of a checkpoint of another run."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from torch_thor.capture.patterns import matches
from torch_thor.training.checkpoints.checkpoint import Checkpoint, open_checkpoint
from torch_thor.training.checkpoints.finding import ACCEPTED, find_checkpoints
from torch_thor.training.checkpoints.manifest import AVERAGED, MANIFEST, WEIGHTS
from torch_thor.training.checkpoints.vocabulary import check_tokenizer
from torch_thor.training.config.recipe import Recipe
from torch_thor.training.errors import UserError, require

SHOWN = 3  # largest number of names in a message
COUNTERS = "num_batches_tracked"  # buffers of BatchNorm that many files lack, and that are not needed


@runtime_checkable
class InputEmbedded(Protocol):
    """A network of transformers, which names its input embedding."""

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the input embedding."""
        ...


def with_weights_checksum(recipe: Recipe, say: Callable[[str], None] = lambda _: None) -> Recipe:
    """Record the checksum of the weights that a recipe starts from.

    Args:
        recipe: A recipe.
        say: Prints a line; it is called once for each damaged checkpoint that is skipped.

    Returns:
        The recipe with `weights_sha256`; unchanged if it has a checksum already, or no `weights`.
    """
    if recipe.weights is None or recipe.weights_sha256 is not None:
        return recipe
    path, _ = _find(recipe.weights, say)
    return replace(recipe, weights_sha256=_checksum(path))


def load_weights(model: nn.Module, recipe: Recipe, task: object = None) -> None:
    """Load the weights of a recipe into its network.

    Args:
        model: The network, with random weights.
        recipe: The recipe; it has `weights`, and in `weights_except` the weights that stay random.
        task: The task. If it has a tokenizer, the weights of a checkpoint must have been trained with the same one,
            unless `weights_except` contains the input embedding.

    Raises:
        UserError: If the file is missing, does not match `weights_sha256`, or belongs to another network or tokenizer.
    """
    assert recipe.weights is not None
    path, checkpoint = _find(recipe.weights, lambda _: None)  # `with_weights_checksum` has reported damaged ones
    found = _checksum(path)
    require(
        found == (recipe.weights_sha256 or found),
        f"weights={recipe.weights} is not the file that the recipe names: its SHA-256 is {found}, not "
        f"weights_sha256={recipe.weights_sha256}; give the original file, or start another run with --out",
    )
    try:
        given = checkpoint.whole_weights() if checkpoint is not None and checkpoint.is_divided else load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"weights={recipe.weights} is not a safetensors file ({error}): write one with safetensors.torch.save_file"
        ) from error
    own = model.state_dict()
    left_out = _left_out([*own, *given], recipe.weights_except)
    given = {name: tensor for name, tensor in given.items() if name not in left_out}
    _check_fit(own, given, left_out, recipe)
    if checkpoint is not None and checkpoint.tokenizer is not None and _gives_embedding(given, own, model):
        check_tokenizer(checkpoint, task)
    model.load_state_dict(given, strict=False)  # `_check_fit` has compared the names


def _find(word: str, say: Callable[[str], None]) -> tuple[Path, Checkpoint | None]:
    """Return the file of the weights, or the manifest of their parts, and the checkpoint that it belongs to."""
    path = Path(word).expanduser()
    if path.is_file():
        inside = path.name in (WEIGHTS, AVERAGED) and (path.parent / MANIFEST).exists()
        return path, open_checkpoint(path.parent) if inside else None
    found = find_checkpoints(path, say)
    require(bool(found), f"weights={word} is neither a safetensors file nor a checkpoint: give a file, or {ACCEPTED}")
    names = [saved.optimizer for saved in found]
    require(
        len(found) == 1,
        f"weights={word} contains checkpoints of {', '.join(names)}: choose one, such as weights={path / names[0]}",
    )
    return found[0].path / (MANIFEST if found[0].is_divided else WEIGHTS), found[0]


def _gives_embedding(given: dict[str, Tensor], own: dict[str, Tensor], model: nn.Module) -> bool:
    """Return whether the weights of the input embedding are given; true for networks that do not name theirs."""
    if not isinstance(model, InputEmbedded):
        return True
    place = model.get_input_embeddings().weight.data_ptr()
    return any(own[name].data_ptr() == place for name in given)


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"weights={path} cannot be read ({error.strerror}): choose another file") from error


def _left_out(names: Sequence[str], patterns: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if matches(pattern, name)}
        require(
            bool(matched),
            f"weights_except={pattern} matches no weight of the file or of the network; these have {_some(names)}",
        )
        found |= matched
    return found


def _check_fit(own: dict[str, Tensor], given: dict[str, Tensor], left_out: set[str], recipe: Recipe) -> None:
    # safetensors stores a shared weight under only one of its names
    known = {own[name].data_ptr() for name in given if name in own and own[name].numel()}
    missing = [
        name
        for name, tensor in own.items()
        if not (name in given or name in left_out or name.endswith(COUNTERS) or tensor.data_ptr() in known)
    ]
    unexpected = sorted(name for name in given if name not in own)
    other = [
        f"{name} {tuple(tensor.shape)} for {tuple(own[name].shape)}"
        for name, tensor in given.items()
        if name in own and tensor.shape != own[name].shape
    ]
    parts = {"missing": missing, "unexpected": unexpected, "of another shape": other}
    faults = [f"{what}: {_some(names)}" for what, names in parts.items() if names]
    require(
        not faults,
        f"weights={recipe.weights} do not fit model={recipe.model} ({'; '.join(faults)}): choose the network that they "
        f"belong to, or exclude weights, such as those of the head, with weights_except=[NAME]",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
