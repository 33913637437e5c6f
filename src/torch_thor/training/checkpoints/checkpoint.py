"""Writing, finding and opening checkpoints, which are either complete or absent.

A checkpoint is a folder `step-00000123` that contains

    model.safetensors      the weights; loading them executes no code
    averaged.safetensors   the averaged weights, if the run has any
    state.pt               state of optimizer, loss scale, random number generators and data; loading executes no code
    metrics.jsonl.gz       the lines of `metrics.jsonl` up to the step, in case that file is lost
    recipe.yaml            the recipe of the run
    manifest.json          the step, the SHA-256 of each file above and of the tokenizer of the training data, if they
                           have one, and a checksum of the manifest itself

It is written under a temporary name, flushed to the disk, and renamed. Opening it verifies the checksums. The best
checkpoint of a run has the same form and is in the folder `best`. Checkpoints of the older format 2 have no metrics and
no checksum of the manifest itself; everything else is verified in the same way.

If the parameters are divided among processes, the weights and the tensors of the optimizer are in the files of
`torch.distributed.checkpoint` instead (`.metadata`, `__0_0.distcp`, ...), and each process writes its own.
"""

import gzip
import pickle
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from torch_thor.capture.sharding import is_sharded
from torch_thor.files import remove_remains, whole_folder
from torch_thor.training.checkpoints.manifest import (
    AVERAGED,
    AVERAGED_PARTS,
    MANIFEST,
    METADATA,
    METRICS,
    PREFIX,
    RECIPE,
    STATE,
    WEIGHT_PARTS,
    WEIGHTS,
    read_manifest,
    write_manifest,
)
from torch_thor.training.checkpoints.parts import empty_tensors, fill_parts, read_parts
from torch_thor.training.errors import DamagedCheckpointError, UserError, first_line

BEST = "best"  # the folder of the best checkpoint, inside that of the newest ones


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums matched when it was opened.

    Args:
        path: Its folder.
        step: Optimizer steps done.
        optimizer: The optimizer's name in the recipe.
        tokenizer: The SHA-256 checksum of the tokenizer of the training data; `None` if they have no tokenizer, and in
            checkpoints of earlier versions.
    """

    path: Path
    step: int
    optimizer: str
    tokenizer: str | None = None

    @property
    def recipe_text(self) -> str:
        """The recipe of the run, in YAML."""
        return (self.path / RECIPE).read_text(encoding="utf-8")

    @property
    def metrics(self) -> bytes | None:
        """The run's `metrics.jsonl` up to this step; `None` in a checkpoint of format 2."""
        path = self.path / METRICS
        return gzip.decompress(path.read_bytes()) if path.exists() else None

    @property
    def is_divided(self) -> bool:
        """Whether the network was divided among processes, and each has written its parts."""
        return (self.path / METADATA).exists()

    @property
    def has_average(self) -> bool:
        """Whether it contains averaged weights."""
        if self.is_divided:
            return bool(empty_tensors(self.path, AVERAGED_PARTS))
        return (self.path / AVERAGED).exists()

    def whole_weights(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """Load the weights, as one process holds them.

        Args:
            averaged: Whether to load the averaged weights instead.

        Returns:
            The weights by name. Of a weight with several names, only one may be there.
        """
        if not self.is_divided:
            return load_file(self.path / (AVERAGED if averaged else WEIGHTS))
        prefix = AVERAGED_PARTS if averaged else WEIGHT_PARTS
        weights = empty_tensors(self.path, prefix)
        read_parts(self.path, weights)
        return {name.removeprefix(prefix): weight for name, weight in weights.items()}

    def load_weights(self, model: nn.Module, *, averaged: bool = False) -> None:
        """Load the weights into a model of the same shape, without communicating.

        Args:
            model: The network, which may be divided among the processes.
            averaged: Whether to load the averaged weights instead.

        Raises:
            UserError: If the weights belong to another network.
        """
        path = self.path if self.is_divided else self.path / (AVERAGED if averaged else WEIGHTS)
        try:
            if self.is_divided:
                prefix = AVERAGED_PARTS if averaged else WEIGHT_PARTS
                read_parts(self.path, {f"{prefix}{name}": weight for name, weight in model.state_dict().items()})
            elif any(is_sharded(parameter) for parameter in model.parameters()):
                fill_parts(model, self.whole_weights(averaged=averaged))
            else:
                load_model(model, path)
        except (RuntimeError, OSError, SafetensorError, UserError) as error:
            lines = str(error).splitlines()
            reason = lines[min(1, len(lines) - 1)].strip()  # torch names the first mismatch in the second line
            raise UserError(f"{path} does not contain the weights of this network ({reason})") from error

    def load_state(self) -> dict[str, Any]:
        """Load everything but the weights, without executing code.

        Returns:
            The `state` that was given to `save`.

        Raises:
            DamagedCheckpointError: If the file is not an archive of tensors and plain values.
        """
        try:
            state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise DamagedCheckpointError(f"{self.path / STATE} cannot be loaded ({first_line(error)})") from error
        return state


def save(
    folder: Path,
    model: nn.Module,
    state: dict[str, Any],
    *,
    step: int,
    optimizer: str,
    recipe: str,
    keep: int,
    metrics: bytes | None = None,
    average: nn.Module | None = None,
    tokenizer: str | None = None,
) -> Path:
    """Write a checkpoint, then remove older ones.

    Args:
        folder: The folder that contains the folders of the checkpoints.
        model: The network.
        state: Tensors and plain values, for everything but the weights.
        step: Optimizer steps done.
        optimizer: The optimizer's name in the recipe.
        recipe: The recipe of the run, in YAML.
        keep: Number of newest checkpoints to keep, including this one. Checkpoints of later steps do not count: a run
            continues from an earlier step only if they are damaged.
        metrics: The content of the run's `metrics.jsonl`, which ends with this step.
        average: The network with averaged weights.
        tokenizer: The checksum of the tokenizer of the training data, if they have one.

    Returns:
        The folder of the new checkpoint.

    Raises:
        UserError: If the checkpoint cannot be written. No incomplete checkpoint is left, and older ones are kept.
    """
    final = folder / f"{PREFIX}{step:08d}"
    with cannot_be_written(final):
        folder.mkdir(parents=True, exist_ok=True)
        remove_remains(folder)
        with whole_folder(final) as temporary:  # replaces a damaged checkpoint of the same step
            _write_weights(temporary, model, average)
            write_values(temporary, state, recipe, metrics)
            write_manifest(temporary, step=step, optimizer=optimizer, tokenizer=tokenizer)
    remove_older(final, keep)
    return final


@contextmanager
def cannot_be_written(final: Path) -> Iterator[None]:
    """Give the reason if the block cannot write a checkpoint.

    Args:
        final: The folder of the checkpoint.

    Yields:
        Nothing.

    Raises:
        UserError: If the block raises an error of the disk.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own for a full disk
        reason = _reason(error)
        kept = _newest_first(final.parent)
        left = f"the newest complete one is {kept[0].name}" if kept else "there is no earlier one"
        raise UserError(
            f"checkpoint {final} cannot be written ({reason}); {left}: free some disk space, then continue with "
            "--resume"
        ) from error


def remove_older(final: Path, keep: int) -> None:
    """Remove the oldest checkpoints.

    Args:
        final: The newest checkpoint, in the folder of the others.
        keep: Number of checkpoints to keep up to this one, including it.
    """
    older = [path for path in _newest_first(final.parent) if path.name < final.name]
    for old in older[keep - 1 :]:
        shutil.rmtree(old, ignore_errors=True)  # an error here must not end the training; the next checkpoint retries


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:  # torch's own message is a position in the archive; the error of the disk is its cause
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return first_line(error)


def _write_weights(folder: Path, model: nn.Module, average: nn.Module | None) -> None:
    for file, network in [(WEIGHTS, model), *([] if average is None else [(AVERAGED, average)])]:
        # not `save_model`, which adds the other names of shared weights in an order that differs between processes
        weights: dict[str, Tensor] = {}
        places: set[Any] = set()
        for name, tensor in sorted(network.state_dict().items()):
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
            if place not in places:
                weights[name] = tensor.contiguous()
            places.add(place)
        save_file(weights, folder / file)


def write_values(folder: Path, state: dict[str, Any], recipe: str, metrics: bytes | None) -> None:
    """Write the files of a checkpoint that belong to every kind of network.

    Args:
        folder: The folder of the checkpoint, with its weights.
        state: Tensors and plain values, for everything but the weights.
        recipe: The recipe of the run, in YAML.
        metrics: The content of the run's `metrics.jsonl`.
    """
    with (folder / STATE).open("wb") as file:  # given a path, torch would not give the reason of a failure
        torch.save(state, file)
    for path in folder.glob("*.safetensors"):  # safetensors makes them readable for their owner only
        path.chmod(stat.S_IMODE((folder / STATE).stat().st_mode))
    if metrics is not None:
        (folder / METRICS).write_bytes(gzip.compress(metrics, compresslevel=1, mtime=0))
    (folder / RECIPE).write_text(recipe, encoding="utf-8")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint and verify its checksums.

    Args:
        path: Its folder.

    Returns:
        The checkpoint.

    Raises:
        DamagedCheckpointError: If a file is missing, truncated or altered.
    """
    manifest = read_manifest(path)
    return Checkpoint(path, manifest["step"], manifest["optimizer"], manifest.get("tokenizer"))


def newest_whole(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint whose checksums match, the best one included.

    Args:
        folder: The folder of the checkpoints.
        say: Prints a line; it is called once for each damaged checkpoint.

    Returns:
        The checkpoint, or `None` if there is none at all.

    Raises:
        DamagedCheckpointError: If there are checkpoints and every one is damaged.
    """
    candidates = sorted([*_newest_first(folder), *_newest_first(folder / BEST)], key=lambda p: p.name, reverse=True)
    for path in candidates:
        try:
            return open_checkpoint(path)
        except DamagedCheckpointError as error:
            say(f"{error}; falling back to the previous one")
    if candidates:
        raise DamagedCheckpointError(f"every checkpoint in {folder} is damaged: start again with --overwrite or --out")
    return None


def holds_checkpoints(path: Path) -> bool:
    """Return whether a path is a folder of checkpoints.

    Args:
        path: Any path.

    Returns:
        True if it contains a checkpoint, damaged or not.
    """
    return path.is_dir() and bool(_newest_first(path))


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, damaged or not.

    Args:
        path: Any path.

    Returns:
        True for a folder that has the name of a checkpoint or contains a manifest.
    """
    return path.is_dir() and (path.name.startswith(PREFIX) or (path / MANIFEST).exists())


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"), reverse=True)
