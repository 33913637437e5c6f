"""Checkpoints that are either complete or absent.

A checkpoint is a folder `step-00000123` with

    model.safetensors      the weights: loading them runs no code
    averaged.safetensors   their moving average, where there is one
    state.pt               optimizer, loss scale, random numbers, position: tensors and plain values, loaded as such
    metrics.jsonl.gz       the lines of `metrics.jsonl` up to its step, so that the run can do without that file
    recipe.yaml            the recipe as run
    manifest.json          the step, the SHA-256 of each file above, and one of its own

It is written under a temporary name, flushed to the disk, and renamed. Reading starts with the checksums. The best one
of a run is in a folder of its own, `best`, in the same form. Checkpoints of format 2 have no metrics and no
checksum of the manifest itself; all else in them is checked as here.
"""

import gzip
import json
import pickle
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from torch_thor.files import remove_remains, whole_folder
from torch_thor.training.checksums import CHECKSUM, intact, sealed, sha256
from torch_thor.training.errors import DamagedCheckpointError, UserError, first_line

FORMAT, UNSEALED_FORMAT = 3, 2
PREFIX = "step-"
BEST = "best"
WEIGHTS, AVERAGED, STATE = "model.safetensors", "averaged.safetensors", "state.pt"
METRICS, RECIPE, MANIFEST = "metrics.jsonl.gz", "recipe.yaml", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums were right when it was opened."""

    path: Path
    step: int
    optimizer: str

    @property
    def recipe_text(self) -> str:
        """The recipe as run, in YAML."""
        return (self.path / RECIPE).read_text(encoding="utf-8")

    @property
    def metrics(self) -> bytes | None:
        """The run's `metrics.jsonl` up to this step; `None` in a checkpoint of format 2."""
        path = self.path / METRICS
        return gzip.decompress(path.read_bytes()) if path.exists() else None

    @property
    def has_average(self) -> bool:
        """Whether averaged weights are in it."""
        return (self.path / AVERAGED).exists()

    def load_weights(self, model: nn.Module, *, averaged: bool = False) -> None:
        """Load the weights into a model of the same shape.

        Args:
            model: The network.
            averaged: Whether to load the averaged ones.

        Raises:
            UserError: If the weights are those of another network.
        """
        path = self.path / (AVERAGED if averaged else WEIGHTS)
        try:
            load_model(model, path)
        except (RuntimeError, OSError, SafetensorError) as error:
            lines = str(error).splitlines()
            reason = lines[min(1, len(lines) - 1)].strip()  # torch names the first culprit in the second line
            raise UserError(f"{path} does not hold the weights of this network ({reason})") from error

    def load_state(self) -> dict[str, Any]:
        """Load everything but the weights, without running code.

        Returns:
            What was given to `save` as `state`.

        Raises:
            DamagedCheckpointError: If the file is no archive of tensors and plain values.
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
) -> Path:
    """Write a checkpoint, then remove the oldest ones before it.

    Args:
        folder: The folder of the checkpoints, which are folders themselves.
        model: The network.
        state: Tensors and plain values, for everything but the weights.
        step: Optimizer steps done.
        optimizer: The optimizer's name in the recipe.
        recipe: The recipe as run, in YAML.
        keep: Newest checkpoints to keep, this one among them; a newer one, which can only be damaged, does not count.
        metrics: The run's `metrics.jsonl`, which ends with this step.
        average: The network with averaged weights.

    Returns:
        The new checkpoint's folder.

    Raises:
        UserError: If it cannot be written whole; then nothing half-written is left, and older ones are as before.
    """
    final = folder / f"{PREFIX}{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_remains(folder)
        with whole_folder(final) as temporary:  # it may be there: a run falls back past a damaged checkpoint
            _write(temporary, model, state, {"step": step, "optimizer": optimizer}, recipe, metrics, average)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        reason = _reason(error)
        whole = _newest_first(folder)
        left = f"the newest whole one is {whole[0].name}" if whole else "there is none before it"
        raise UserError(
            f"checkpoint {final} cannot be written ({reason}); {left}: make room, then go on with --resume"
        ) from error
    older = [path for path in _newest_first(folder) if path.name < final.name]
    for old in older[keep - 1 :]:
        shutil.rmtree(old, ignore_errors=True)  # no reason to end a training: the next checkpoint tries again
    return final


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:  # torch reports positions in an archive, where the cause is the error of a full disk
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return first_line(error)


def _write(
    folder: Path,
    model: nn.Module,
    state: dict[str, Any],
    about: dict[str, Any],
    recipe: str,
    metrics: bytes | None,
    average: nn.Module | None,
) -> None:
    save_model(model, str(folder / WEIGHTS))
    if average is not None:
        save_model(average, str(folder / AVERAGED))
    with (folder / STATE).open("wb") as file:  # given a path, torch would not say why it could not be written
        torch.save(state, file)
    for path in folder.glob("*.safetensors"):  # safetensors makes them readable by their owner only
        path.chmod(stat.S_IMODE((folder / STATE).stat().st_mode))
    if metrics is not None:
        (folder / METRICS).write_bytes(gzip.compress(metrics, compresslevel=1, mtime=0))
    (folder / RECIPE).write_text(recipe, encoding="utf-8")
    sums = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    manifest = sealed({"format": FORMAT, **about, "sha256": sums})
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def open_checkpoint(path: Path) -> Checkpoint:
    """Check one checkpoint.

    Args:
        path: Its folder.

    Returns:
        The checkpoint.

    Raises:
        DamagedCheckpointError: If a file is missing, cut short or altered.
    """
    try:
        manifest = _manifest(path)
        for name, digest in manifest["sha256"].items():
            if sha256(path / name) != digest:
                raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} does not match its checksum")
        return Checkpoint(path, manifest["step"], manifest["optimizer"])
    except OSError as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error.strerror}: {error.filename}") from error


def _manifest(path: Path) -> Mapping[str, Any]:
    # of a checkpoint, when it holds what `save` writes
    damaged = DamagedCheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is not whole")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        raise damaged from error
    if not isinstance(manifest, dict):
        raise damaged
    format_ = manifest.get("format")
    # a version to come may write anything, but one whose checksum is wrong is only damaged
    if (CHECKSUM in manifest or format_ == FORMAT) and not intact(manifest):
        raise damaged
    if format_ not in (FORMAT, UNSEALED_FORMAT):
        raise DamagedCheckpointError(f"{path} has format {format_}, this version reads {UNSEALED_FORMAT} and {FORMAT}")
    step, sums = manifest.get("step"), manifest.get("sha256")
    if type(step) is not int or not isinstance(manifest.get("optimizer"), str) or not isinstance(sums, dict):
        raise damaged
    missing = {WEIGHTS, STATE, RECIPE, *sums} - {file.name for file in path.iterdir()}
    if missing:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {', '.join(sorted(missing))} is missing")
    if not {WEIGHTS, STATE, RECIPE} <= sums.keys():
        raise damaged
    if path.name.startswith(PREFIX) and path.name != f"{PREFIX}{step:08d}":
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: it holds step {step}")
    return manifest


def newest_whole(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that passes its checksums, the best one among them.

    Args:
        folder: The folder of the checkpoints.
        say: Told, in one line each, which ones are damaged.

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
            say(f"{error}; falling back to the one before")
    if candidates:
        raise DamagedCheckpointError(f"every checkpoint in {folder} is damaged: start again with --overwrite or --out")
    return None


def holds_checkpoints(path: Path) -> bool:
    """Tell whether a path is a folder of checkpoints.

    Args:
        path: Any path.

    Returns:
        True if one is in it, whole or not.
    """
    return path.is_dir() and bool(_newest_first(path))


def is_checkpoint(path: Path) -> bool:
    """Tell whether a path is meant as a checkpoint, whole or not.

    Args:
        path: Any path.

    Returns:
        True for a folder that is named like one or holds a manifest.
    """
    return path.is_dir() and (path.name.startswith(PREFIX) or (path / MANIFEST).exists())


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"), reverse=True)
