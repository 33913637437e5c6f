"""The description of the machine and the versions that a result was measured with."""

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from torch_thor import __version__
from torch_thor.split import processor_name

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where studies train


def synchronize() -> None:
    """Wait until the device has done what it was told."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def provenance() -> dict[str, Any]:
    """Return the commit, whether its sources were changed, the machine and the versions."""
    import torchvision  # imported here because it takes a second, and only measurements need it

    root = Path(__file__).parent
    built_with = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {
        "commit": commit(),
        "dirty": bool(_git(root, "status", "--porcelain", "--", ":/src", ":/benchmarks/*.py")),
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "blas": built_with[1] if built_with else "unknown",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "torch_thor": __version__,
    }


def commit(file: Path = Path(__file__)) -> str:
    """Return the commit of the checkout that a file belongs to."""
    tracked = _git(file.parent, "ls-files", "--error-unmatch", file.name)
    return (_git(file.parent, "rev-parse", "HEAD") if tracked else "") or "unknown"


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
