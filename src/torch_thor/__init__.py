"""torch-thor: the THOR natural-gradient optimizer for PyTorch."""

from torch_thor.optim import intervals
from torch_thor.optim.agc import ClipStatistics, adaptive_clip_grad_
from torch_thor.optim.agc_sgd import AGCSGD
from torch_thor.optim.lamb import LAMB
from torch_thor.optim.thor import THOR
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
]

__version__ = "0.1.0"
