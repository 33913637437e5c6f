"""Writing the checkpoint of a network whose parameters are divided among the processes."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_thor.files import REMAINS, remove_remains, whole_folder
from torch_thor.training.checkpoints.checkpoint import cannot_be_written, remove_older, write_values
from torch_thor.training.checkpoints.manifest import AVERAGED_PARTS, PREFIX, WEIGHT_PARTS, write_manifest
from torch_thor.training.checkpoints.parts import write_parts
from torch_thor.training.checksums import sha256
from torch_thor.training.engine import parallel


def save_divided(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    *,
    step: int,
    optimizer: str,
    recipe: str,
    keep: int,
    metrics: bytes | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Write a checkpoint of which each process writes its parts, then remove older ones. Every process must call it.

    Args:
        folder: The folder that contains the folders of the checkpoints, which all processes see.
        tensors: The tensors of weights and optimizer by name, of which each process has its part.
        state: Tensors and plain values, for everything else. As the arguments below, only that of rank 0 counts.
        step: Optimizer steps done.
        optimizer: The optimizer's name in the recipe.
        recipe: The recipe of the run, in YAML.
        keep: Number of newest checkpoints to keep, as for `checkpoint.save`.
        metrics: The content of the run's `metrics.jsonl`, which ends with this step.
        tokenizer: The checksum of the tokenizer of the training data, if they have one.

    Returns:
        The folder of the new checkpoint.

    Raises:
        UserError: If the checkpoint cannot be written. No incomplete checkpoint is left, and older ones are kept.
    """
    final = folder / f"{PREFIX}{step:08d}"
    temporary = final.with_name(f"{REMAINS}{final.name}")
    with ExitStack() as complete:
        with parallel.agreed(), cannot_be_written(final):
            if parallel.is_first():
                folder.mkdir(parents=True, exist_ok=True)
                remove_remains(folder)
                complete.enter_context(whole_folder(final))
        with parallel.agreed(), cannot_be_written(final):
            write_parts(temporary, tensors)
        with parallel.agreed(), cannot_be_written(final):  # each process reads only what it has written
            own = {path.name: sha256(path) for path in temporary.glob(f"__{parallel.shard().rank}_*")}
        sums = {name: digest for part in parallel.gathered(own) for name, digest in part.items()}
        with parallel.agreed(), cannot_be_written(final):
            if parallel.is_first():
                write_values(temporary, state, recipe, metrics)
                write_manifest(temporary, step=step, optimizer=optimizer, tokenizer=tokenizer, sums=sums)
                complete.close()
                remove_older(final, keep)
    return final


def weight_parts(model: nn.Module, average: nn.Module | None) -> dict[str, Tensor]:
    """Return the weights of a divided network.

    Args:
        model: The network.
        average: The network with averaged weights, if there is one.

    Returns:
        Parameters and buffers by name, with a prefix; of a parameter each process has its part.
    """
    networks = {WEIGHT_PARTS: model, **({} if average is None else {AVERAGED_PARTS: average})}
    return {
        f"{prefix}{name}": value
        for prefix, network in networks.items()
        for name, value in network.state_dict().items()
        if isinstance(value, Tensor)
    }
