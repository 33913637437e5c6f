"""The paper's figures on small data sets: each is measured into raw data, and drawn from these alone."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.bench.figures.catalogue import FIGURES, figure_table, make_figures
    from torch_thor.bench.figures.figure import Options, numbers
    from torch_thor.bench.figures.raw import RawData, read

__all__ = ["FIGURES", "Options", "RawData", "figure_table", "make_figures", "numbers", "read"]

_MODULES = {
    "torch_thor.bench.figures.catalogue": ("FIGURES", "figure_table", "make_figures"),
    "torch_thor.bench.figures.figure": ("Options", "numbers"),
    "torch_thor.bench.figures.raw": ("RawData", "read"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
