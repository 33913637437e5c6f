"""The figures of the paper on small data sets. Measurements are stored as raw data, from which figures are drawn."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.bench.figures.catalogue import FIGURES, figure_table, make_figures
    from torch_thor.bench.figures.figure import Options
    from torch_thor.bench.figures.raw import RawData, read

__all__ = ["FIGURES", "Options", "RawData", "figure_table", "make_figures", "read"]

_MODULES = {
    "torch_thor.bench.figures.catalogue": ("FIGURES", "figure_table", "make_figures"),
    "torch_thor.bench.figures.figure": ("Options",),
    "torch_thor.bench.figures.raw": ("RawData", "read"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
