"""The manifest of a checkpoint: the names of its files, and the checks that they are complete and unaltered."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_thor.training.checksums import CHECKSUM, add_checksum, checksum_matches, sha256
from torch_thor.training.errors import DamagedCheckpointError

FORMAT = 3
FORMAT_DIVIDED = 4  # of networks whose parameters are divided among processes
PREFIX = "step-"  # of the name of a checkpoint's folder
WEIGHTS, AVERAGED, STATE = "model.safetensors", "averaged.safetensors", "state.pt"
METADATA = ".metadata"  # of the parts of a divided checkpoint, which contains no file of weights
WEIGHT_PARTS, AVERAGED_PARTS = "model.", "averaged."  # the beginnings of the names of its weights
METRICS, RECIPE, MANIFEST = "metrics.jsonl.gz", "recipe.yaml", "manifest.json"


def write_manifest(
    folder: Path, *, step: int, optimizer: str, tokenizer: str | None = None, sums: Mapping[str, str] | None = None
) -> None:
    """Write the manifest of a checkpoint whose other files are complete.

    Args:
        folder: The folder of the checkpoint.
        step: Optimizer steps done.
        optimizer: The optimizer's name in the recipe.
        tokenizer: The checksum of the tokenizer of the training data, if they have one.
        sums: The SHA-256 checksums of files that need not be read here, because the processes that wrote them know.
    """
    known = dict(sums or {})
    found = {path.name: known.get(path.name) or sha256(path) for path in sorted(folder.iterdir())}
    format_ = FORMAT_DIVIDED if METADATA in found else FORMAT
    values = {"format": format_, "step": step, "optimizer": optimizer, "sha256": {**known, **found}}
    manifest = add_checksum(values if tokenizer is None else {**values, "tokenizer": tokenizer})
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Mapping[str, Any]:
    """Read the manifest of a checkpoint and verify it and all files of the checkpoint.

    Args:
        path: The folder of the checkpoint.

    Returns:
        The manifest, with the keys `step`, `optimizer` and `sha256`, and `tokenizer` if the training data have one.

    Raises:
        DamagedCheckpointError: If a file is missing, truncated or altered.
    """
    try:
        manifest = _checked(path, _parsed(path))
        for name, digest in manifest["sha256"].items():
            if sha256(path / name) != digest:
                raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} does not match its checksum")
    except OSError as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error.strerror}: {error.filename}") from error
    return manifest


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise _invalid(path) from error
    if not isinstance(manifest, dict):
        raise _invalid(path)
    return manifest


def _checked(path: Path, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    # the manifest, if it has the content that `write_manifest` writes, and all its files exist
    format_ = manifest.get("format")
    # the manifest of a later version may differ in anything but its checksum
    if (CHECKSUM in manifest or format_ in (FORMAT, FORMAT_DIVIDED)) and not checksum_matches(manifest):
        raise _invalid(path)
    if format_ not in (FORMAT, FORMAT_DIVIDED):
        raise DamagedCheckpointError(
            f"checkpoint {path} has format {format_}, and this version of torch-thor reads {FORMAT} and "
            f"{FORMAT_DIVIDED}"
        )
    step, sums = manifest.get("step"), manifest.get("sha256")
    names = (manifest.get("optimizer"), manifest.get("tokenizer", ""))
    if type(step) is not int or not all(isinstance(name, str) for name in names) or not isinstance(sums, dict):
        raise _invalid(path)
    needed = {METADATA if format_ == FORMAT_DIVIDED else WEIGHTS, STATE, RECIPE}
    missing = {*needed, *sums} - {file.name for file in path.iterdir()}
    if missing:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {', '.join(sorted(missing))} is missing")
    if not needed <= sums.keys():
        raise _invalid(path)
    if path.name.startswith(PREFIX) and path.name != f"{PREFIX}{step:08d}":
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: it contains step {step}")
    return manifest


def _invalid(path: Path) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is truncated or altered")
