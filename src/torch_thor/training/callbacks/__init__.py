"""Callbacks of the training loop: the metrics file, progress, TensorBoard, the profiler."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.callbacks.metrics_file import MetricsFile, read_metrics
    from torch_thor.training.callbacks.profiling import Profiler
    from torch_thor.training.callbacks.progress import Bar, Display, Lines
    from torch_thor.training.callbacks.tensorboard import TensorBoard

__all__ = ["Bar", "Display", "Lines", "MetricsFile", "Profiler", "TensorBoard", "read_metrics"]

_MODULES = {
    "torch_thor.training.callbacks.metrics_file": ("MetricsFile", "read_metrics"),
    "torch_thor.training.callbacks.profiling": ("Profiler",),
    "torch_thor.training.callbacks.progress": ("Bar", "Display", "Lines"),
    "torch_thor.training.callbacks.tensorboard": ("TensorBoard",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
