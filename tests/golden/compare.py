"""Golden files: read, and compared with what a run gives now.

On the machine that recorded them every bit must be the same. On another processor, or with another
torch, sums round in another way: there the first losses must agree to a tolerance, and of the state
dicts all but the numbers.
"""

import json
import math
import platform
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
TOLERANCE = 1e-3  # relative, of a loss; kernels for SSE differ from those for AVX-512 by 1e-6
# decoders and resizing round to whole pixel values, which changes the losses of this run by 1e-3
TOLERANCES = {"image-folder": 2e-2}
FIRST_STEPS = 8  # later, rounding has grown, and may have changed what a refresh decides
MOST_LINES = 8  # of differences that are listed
# what decodes images, and what computes parts of the layers that are not torch's
LIBRARIES = ("torchvision", "Pillow", "scikit-learn", "timm", "transformers")


def fingerprint():
    """What the bits of a run depend on, beside the program."""
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "threads": 1,  # see `runs.settled`
        **{library: version(library) for library in LIBRARIES},
    }


def _processor():
    # more than the name, which a virtual machine may not know; caches, because libraries cut their
    # loops by them
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    first = info.read_text().partition("\n\n")[0]
    pairs = [line.partition(":") for line in first.splitlines()]
    found = {key.strip(): value.strip() for key, _, value in pairs}
    known = ("cpu family", "model", "stepping", "cache size")
    parts = [f"{key} {found[key]}" for key in known if key in found]
    return ", ".join([found.get("model name", platform.machine()), *parts])


def content_of(found):
    """What a file holds, for a run that was just made."""
    return {"fingerprint": fingerprint(), **found}


def read(name):
    """The file of a run; None where there is none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write(name, content):
    """Write the file of a run, with a line for each value."""
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def other_machine(golden, now):
    """How this machine differs from the machine that recorded; empty where every bit must agree."""
    recorded, here = golden["fingerprint"], now["fingerprint"]
    return [
        f"{key} {recorded.get(key)} there, {here.get(key)} here"
        for key in {**recorded, **here}
        if recorded.get(key) != here.get(key)
    ]


def differences(name, golden, now):
    """A line a difference from what was recorded, the first step that differs before all else."""
    if golden["settings"] != now["settings"]:
        return [f"{name}: its settings were {golden['settings']} and are {now['settings']}"]
    exact = not other_machine(golden, now)
    lines = _of_losses(name, golden["losses"], now["losses"], exact)
    for kind in ("refreshes", "evaluations") if exact else ():
        for old, new in zip_longest(golden[kind], now[kind], fillvalue="nothing"):
            if old != new:
                found = f"'{old}' was recorded, '{new}' is the first that differs"
                lines.append(f"{name}: {kind}: {found}")
                break
    for kind in ("optimizer", "model"):
        lines += _of_states(f"{name}: {kind}", golden[kind], now[kind], exact)
    return lines


def computed_differences(name, golden, now):
    """As `differences`, but only of what was computed: a name of a setting or state may change."""
    same = {key: golden[key] for key in ("settings", "optimizer")}
    return differences(name, golden, {**now, **same})


def move_of_losses(golden, now):
    """The relative move of the first loss that differs; infinite where one run has more steps.

    Training amplifies even one rounding, so later differences say nothing of the change.
    """
    if len(golden["losses"]) != len(now["losses"]):
        return math.inf
    moves = map(_relative, golden["losses"], now["losses"])
    return next((move for move in moves if move), 0.0)


def _relative(old, new):
    if old == new:
        return 0.0
    old, new = float.fromhex(old), float.fromhex(new)
    by = abs(new - old) / abs(old) if old else math.inf
    return by if math.isfinite(by) else math.inf


def _of_losses(name, golden, now, exact):
    count = len(golden)
    if count != len(now):
        return [f"{name}: {count} steps were recorded, and now there are {len(now)}"]
    tolerance = TOLERANCES.get(name, TOLERANCE)
    for step, (recorded, found) in enumerate(zip(golden, now, strict=True), 1):
        if not exact and step > FIRST_STEPS:
            break
        old, new = float.fromhex(recorded), float.fromhex(found)
        if recorded == found if exact else math.isclose(old, new, rel_tol=tolerance):
            continue
        return [
            f"{name}: step {step} of {count} is the first whose loss differs: "
            f"{recorded} ({old:.9g}) was recorded, {found} ({new:.9g}) is found; "
            f"by {_relative(recorded, found):.1e}"
            + ("" if exact else f", and {tolerance:g} is allowed on another machine")
        ]
    return []


def _of_states(where, golden, now, exact):
    lines = [f"{where}: {key} is gone" for key in golden if key not in now]
    lines += [f"{where}: {key} is new" for key in now if key not in golden]
    for key in [key for key in golden if key in now]:
        recorded, found = golden[key], now[key]
        if not exact:  # a tensor keeps dtype, shape and strides, a number its type
            recorded, found = (
                value.partition(" sha256 ")[0] if isinstance(value, str) else type(value).__name__
                for value in (recorded, found)
            )
        # as text: NaN is NaN, 1 is not 1.0, and a tuple is a list
        if json.dumps(recorded) != json.dumps(found):
            lines.append(f"{where}: {key}: {recorded} was recorded, {found} is found")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"{where}: and {len(lines) - MOST_LINES} more"]
    return lines
