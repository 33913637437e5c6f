"""The optimizers by the names that recipes and tools have for them: one line for each."""

import torch

from torch_thor.optim.agc import AGCSGD
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.lamb import LAMB
from torch_thor.optim.thor import THOR
from torch_thor.optim.thor_muon import ThorMuon

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "thor-muon": ThorMuon,
    "thor": THOR,
    "lamb": LAMB,
    "agc-sgd": AGCSGD,
}
# those with Kronecker factors, which can be split and divided
WITH_CURVATURE = {
    name: kind for name, kind in OPTIMIZERS.items() if issubclass(kind, CurvatureOptimizer)
}
