"""torch-thor: the THOR natural-gradient optimizer for PyTorch."""

from torch_thor.optim import intervals
from torch_thor.optim.thor import THOR
from torch_thor.split.choice import SplitChoice, choose_split_dim

__all__ = ["THOR", "SplitChoice", "__version__", "choose_split_dim", "intervals"]

__version__ = "0.1.0"
