"""The paper's figures on small data sets: each is measured into raw data, and drawn from these alone."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.bench.figures.catalogue import FIGURES, make_figures
    from torch_thor.bench.figures.figure import Options

__all__ = ["FIGURES", "Options", "make_figures"]

_MODULES = {
    "torch_thor.bench.figures.catalogue": ("FIGURES", "make_figures"),
    "torch_thor.bench.figures.figure": ("Options",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
