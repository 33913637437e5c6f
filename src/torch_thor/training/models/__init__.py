"""The networks that a recipe can name."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.models.autoencoder import deep_autoencoder
    from torch_thor.training.models.char_transformer import CharTransformer
    from torch_thor.training.models.classifiers import MODELS, BasicBlock, SmallResNet, build_model
    from torch_thor.training.models.library import LibraryModel, find_model

__all__ = [
    "MODELS",
    "BasicBlock",
    "CharTransformer",
    "LibraryModel",
    "SmallResNet",
    "build_model",
    "deep_autoencoder",
    "find_model",
]

_MODULES = {
    "torch_thor.training.models.autoencoder": ("deep_autoencoder",),
    "torch_thor.training.models.char_transformer": ("CharTransformer",),
    "torch_thor.training.models.classifiers": ("MODELS", "BasicBlock", "SmallResNet", "build_model"),
    "torch_thor.training.models.library": ("LibraryModel", "find_model"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
