"""Tables and pictures at the end of a run, and the report of the split dimension."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.reports.refresh_plot import draw_refreshes
    from torch_thor.training.reports.split_report import measure_split_dim
    from torch_thor.training.reports.summary import (
        Refreshed,
        Summary,
        as_json,
        draw_curves,
        refresh_table,
        refreshed_layers,
        summary_table,
    )

__all__ = [
    "Refreshed",
    "Summary",
    "as_json",
    "draw_curves",
    "draw_refreshes",
    "measure_split_dim",
    "refresh_table",
    "refreshed_layers",
    "summary_table",
]

_MODULES = {
    "torch_thor.training.reports.refresh_plot": ("draw_refreshes",),
    "torch_thor.training.reports.split_report": ("measure_split_dim",),
    "torch_thor.training.reports.summary": (
        "Refreshed",
        "Summary",
        "as_json",
        "draw_curves",
        "refresh_table",
        "refreshed_layers",
        "summary_table",
    ),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
