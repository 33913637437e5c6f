"""What a figure was measured on: kept beside every result."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import torchvision

import torch_thor


def describe(threads: int | None = None) -> dict[str, Any]:
    """Return machine, versions and commit.

    Args:
        threads: threads of one process, where a script sets them.

    Returns:
        A flat mapping for JSON.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "torch_thor": torch_thor.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    root = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
