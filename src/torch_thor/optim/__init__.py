"""The optimizers: THOR, AGC-SGD and LAMB, and adaptive gradient clipping for any optimizer."""

from torch_thor.optim.agc import ClipStatistics, adaptive_clip_grad_
from torch_thor.optim.agc_sgd import AGCSGD
from torch_thor.optim.lamb import LAMB
from torch_thor.optim.thor import THOR

__all__ = ["AGCSGD", "LAMB", "THOR", "ClipStatistics", "adaptive_clip_grad_"]
