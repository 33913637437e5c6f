"""The optimizers, one file each."""

from torch_thor.optim.thor import THOR

__all__ = ["THOR"]
