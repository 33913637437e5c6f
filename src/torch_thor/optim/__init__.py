"""Optimizers (THOR, ThorMuon, AGC-SGD, LAMB), and adaptive gradient clipping for any optimizer."""

from torch_thor.optim.agc import ClipStatistics, adaptive_clip_grad_
from torch_thor.optim.agc_sgd import AGCSGD
from torch_thor.optim.lamb import LAMB
from torch_thor.optim.param_groups import param_groups
from torch_thor.optim.thor import THOR
from torch_thor.optim.thor_muon import ThorMuon

__all__ = [
    "AGCSGD",
    "LAMB",
    "THOR",
    "ClipStatistics",
    "ThorMuon",
    "adaptive_clip_grad_",
    "param_groups",
]
