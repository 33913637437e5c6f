"""Tasks: a task is a network, its data, its loss and its metrics."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.tasks.autoencoder import Autoencoder
    from torch_thor.training.tasks.char_lm import CharLM
    from torch_thor.training.tasks.image_classification import ImageClassification
    from torch_thor.training.tasks.masked_lm import MaskedLM
    from torch_thor.training.tasks.registry import TASKS, TaskKind

__all__ = ["TASKS", "Autoencoder", "CharLM", "ImageClassification", "MaskedLM", "TaskKind"]

_MODULES = {
    "torch_thor.training.tasks.autoencoder": ("Autoencoder",),
    "torch_thor.training.tasks.char_lm": ("CharLM",),
    "torch_thor.training.tasks.image_classification": ("ImageClassification",),
    "torch_thor.training.tasks.masked_lm": ("MaskedLM",),
    "torch_thor.training.tasks.registry": ("TASKS", "TaskKind"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
