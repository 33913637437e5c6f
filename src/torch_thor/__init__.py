"""torch-thor: the THOR natural-gradient optimizer for PyTorch."""

from torch_thor.optim import intervals
from torch_thor.optim.thor import THOR

__all__ = ["THOR", "__version__", "intervals"]

__version__ = "0.1.0"
