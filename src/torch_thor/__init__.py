"""torch-thor: the THOR natural-gradient optimizer for PyTorch."""

from torch_thor.optim.thor import THOR

__all__ = ["THOR", "__version__"]

__version__ = "0.1.0"
