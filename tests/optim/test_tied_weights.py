"""A parameter in several modules or calls takes one step.

Which modules share: capture/test_inspection.py.
"""

import pytest
import torch
from torch import nn

from comparing import compare
from tiny import cross_entropy


class Shared(nn.Module):
    """Two modules with the same weight, or a module that is called twice.

    A language model has no head.
    """

    def __init__(self, first, second, head=None):
        super().__init__()
        self.first, self.second, self.head = first, second, head
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.parts(x)[0]

    def parts(self, x):
        y = self.first(x)
        seen = [("first", x, y)]
        x = torch.tanh(y)
        y = self.second(x)
        seen.append(("first" if self.second is self.first else "second", x, y))
        if self.head is not None:
            x = torch.tanh(y).flatten(1)
            y = self.head(x)
            seen.append(("head", x, y))
        return y, seen


SETTINGS = {
    "defaults": {"update_interval": 2},
    "everything": {
        "update_interval": 2, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3, "split_dim": 3
    },
}  # fmt: skip
DECODER, POOLED = {"preconditioned": ["first"]}, {"pooled": {"first": ["second"]}}


def twice(layer, width):
    return Shared(layer, layer, nn.Linear(width, 3)), (4, 4), {}


# name: (model, shape of an input, what the reference is told)
TIED = {
    "embedding": lambda: (Shared(nn.Embedding(7, 4), nn.Linear(4, 7)), None, DECODER),
    "padding": lambda: (
        Shared(nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7, bias=False)), None, DECODER
    ),
    "linear": lambda: (Shared(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)), (5,), POOLED),
    "linear_twice": lambda: twice(nn.Linear(4, 4), 16),
    "conv_groups_twice": lambda: twice(nn.Conv1d(4, 4, 3, groups=2, padding=1), 16),
    "norm_twice": lambda: twice(nn.LayerNorm(4), 16),
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", TIED)
def test_steps_with_a_weight_that_is_used_twice(name, settings):
    """A decoder has its embedding's statistics; modules of the same geometry pool their rows."""
    model, shape, known = TIED[name]()
    stream = []
    for _ in range(6):
        x = torch.randint(7, (5, 3)) if shape is None else torch.randn(5, *shape).double()
        labels = torch.randint(7, (5, 3)) if shape is None else torch.randint(3, (5,))
        stream.append((x, cross_entropy(labels)))
    oracle = {"forward": Shared.parts, "reference_options": known}
    optimizer, reference = compare(model.double(), stream, **oracle, **SETTINGS[settings])
    assert set(optimizer.curvature) == set(reference.curvature)
