"""torch-thor: the THOR natural-gradient optimizer for PyTorch."""

from torch_thor import intervals, schedules
from torch_thor.curvature.kinds.registry import register_kind
from torch_thor.distributed.options import Distributed
from torch_thor.optim.agc import AGCSGD, ClipStatistics, adaptive_clip_grad_
from torch_thor.optim.gradients import check_gradients
from torch_thor.optim.lamb import LAMB
from torch_thor.optim.model_argument import model_is
from torch_thor.optim.param_groups import param_groups
from torch_thor.optim.thor import THOR
from torch_thor.optim.thor_muon import ThorMuon
from torch_thor.split import SplitChoice, choose_split_dim
from torch_thor.trainers.labels import follow_labels
from torch_thor.trainers.wrapped import coverage

__all__ = [
    "AGCSGD",
    "LAMB",
    "THOR",
    "ClipStatistics",
    "Distributed",
    "SplitChoice",
    "ThorMuon",
    "__version__",
    "adaptive_clip_grad_",
    "check_gradients",
    "choose_split_dim",
    "coverage",
    "follow_labels",
    "intervals",
    "model_is",
    "param_groups",
    "register_kind",
    "schedules",
]

__version__ = "0.1.0"
