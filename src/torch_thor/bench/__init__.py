"""Benchmarks and figures: a runner that stores raw data, and tables and pictures that are made from raw data alone."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.bench import drawing, markdown
    from torch_thor.bench.machine import provenance
    from torch_thor.bench.numbers import running_mean, steps_to
    from torch_thor.bench.stores import Lines, key_of
    from torch_thor.bench.timing import median_ratio, state_bytes, take_turns, training_step

__all__ = [
    "Lines",
    "drawing",
    "key_of",
    "markdown",
    "median_ratio",
    "provenance",
    "running_mean",
    "state_bytes",
    "steps_to",
    "take_turns",
    "training_step",
]

_MODULES = {
    "torch_thor.bench.machine": ("provenance",),
    "torch_thor.bench.numbers": ("running_mean", "steps_to"),
    "torch_thor.bench.stores": ("Lines", "key_of"),
    "torch_thor.bench.timing": ("median_ratio", "state_bytes", "take_turns", "training_step"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES, ("drawing", "markdown"))
