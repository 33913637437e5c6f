"""THOR (work in progress: the interface that the other parts build on)."""

import torch


class THOR(torch.optim.Optimizer):
    """THOR, for now without a body."""
