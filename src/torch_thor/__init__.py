"""torch-thor: the THOR natural-gradient optimizer for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_thor.curvature.kinds.registry import register_kind
    from torch_thor.optim.agc import ClipStatistics, adaptive_clip_grad_
    from torch_thor.optim.agc_sgd import AGCSGD
    from torch_thor.optim.lamb import LAMB
    from torch_thor.optim.thor import intervals
    from torch_thor.optim.thor.optimizer import THOR
    from torch_thor.split.choice import SplitChoice, choose_split_dim

__all__ = [
    "AGCSGD",
    "LAMB",
    "THOR",
    "ClipStatistics",
    "SplitChoice",
    "__version__",
    "adaptive_clip_grad_",
    "choose_split_dim",
    "intervals",
    "register_kind",
]

__version__ = "0.1.0"

_MODULES = {
    "AGCSGD": "optim.agc_sgd",
    "LAMB": "optim.lamb",
    "THOR": "optim.thor.optimizer",
    "ClipStatistics": "optim.agc",
    "SplitChoice": "split.choice",
    "adaptive_clip_grad_": "optim.agc",
    "choose_split_dim": "split.choice",
    "register_kind": "curvature",
}
_PACKAGES = ("capture", "curvature", "distributed", "optim", "split")

if not TYPE_CHECKING:  # with a module __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Import a public name on its first use (PEP 562).

        Importing torch takes seconds, and the command line must react to Ctrl-C during that time.

        Args:
            name: The public name.

        Returns:
            The object of that name.

        Raises:
            AttributeError: There is no such name.
        """
        if name == "intervals":
            return import_module("torch_thor.optim.thor.intervals")
        if name in _PACKAGES:
            return import_module(f"torch_thor.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'torch_thor' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(f"torch_thor.{_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_PACKAGES})
