"""Stores the chosen split dimensions on disk, in one file for each model, device and version.

The folder of the files is ``TORCH_THOR_CACHE``, or ``torch-thor`` in ``XDG_CACHE_HOME``, or ``torch-thor`` in
``~/.cache``. A file is replaced only by a complete one, so that several processes may write it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.files import write_text
from torch_thor.split.choice import SplitChoice
from torch_thor.split.machine import device_name


def cache_folder() -> Path:
    """Return the folder of the stored choices, which may not exist yet."""
    if os.environ.get("TORCH_THOR_CACHE"):
        return Path(os.environ["TORCH_THOR_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "torch-thor"


def identity(layers: Mapping[str, LayerCurvature]) -> dict[str, Any]:
    """Return the key of a choice: the layers and their sizes, the dtype, the device and the versions."""
    from torch_thor import __version__  # imported here because torch_thor imports this module

    weight = next(iter(layers.values())).weight
    return {
        "layers": [
            [name, one.kind.label, one.kind.groups, one.kind.inputs, one.kind.outputs] for name, one in layers.items()
        ],
        "dtype": str(factor_dtype(weight.dtype)),
        "device": device_name(weight.device),
        "torch": torch.__version__,
        "torch_thor": __version__,
    }


def load(layers: Mapping[str, LayerCurvature]) -> int | None:
    """Return the split dimension that is stored for these layers, on their device and for these versions."""
    key = identity(layers)
    try:
        stored = json.loads(_path(key).read_text())
        split_dim = stored["choice"]["split_dim"] if stored["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return split_dim if type(split_dim) is int and split_dim >= 1 else None


def store(layers: Mapping[str, LayerCurvature], choice: SplitChoice) -> None:
    """Store a choice."""
    key = identity(layers)
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"key": key, "choice": choice.as_dict()}), shared=True)


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"split_dim-{digest[:24]}.json"
