"""The name of the device that a measurement belongs to."""

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} of {platform.machine()}"
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}"


def processor_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
