"""A classifier and its data, small enough to train it in a loop written out by hand."""

import torch
from torch import nn

from torch_thor.training.data import DataBundle


def small_data():
    """20 training samples of 6 numbers in 3 classes, the first four of which are the test set too; always the same."""
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(20, 6, generator=generator), torch.randint(3, (20,), generator=generator)
    return DataBundle(images, labels, images[:4], labels[:4], 3)


def network():
    """6 → 8 → 3, always with the same weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
