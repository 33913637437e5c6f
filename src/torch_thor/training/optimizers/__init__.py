"""The optimizers that a recipe can name, with their settings."""

from typing import TYPE_CHECKING

from torch_thor.lazy import lazy_names

if TYPE_CHECKING:
    from torch_thor.training.optimizers.muon import MuonAdamW
    from torch_thor.training.optimizers.registry import OPTIMIZERS, Entry, build_optimizer, default_settings
    from torch_thor.training.optimizers.settings import OptimizerSettings, settings_of
    from torch_thor.training.optimizers.thor import ThorMuonSettings, THORSettings

__all__ = [
    "OPTIMIZERS",
    "Entry",
    "MuonAdamW",
    "OptimizerSettings",
    "THORSettings",
    "ThorMuonSettings",
    "build_optimizer",
    "default_settings",
    "settings_of",
]

_MODULES = {
    "torch_thor.training.optimizers.muon": ("MuonAdamW",),
    "torch_thor.training.optimizers.registry": ("OPTIMIZERS", "Entry", "build_optimizer", "default_settings"),
    "torch_thor.training.optimizers.settings": ("OptimizerSettings", "settings_of"),
    "torch_thor.training.optimizers.thor": ("ThorMuonSettings", "THORSettings"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
