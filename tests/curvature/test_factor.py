"""The tensors of factors in the state of the weight: row i holds row i of its block, from the
block's first column on.

Layers that share a weight are in tests/capture/test_composites.py; what processes hold is in
tests/distributed.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comparing import refreshed
from tiny import as_list

# a layer, its input, and whether a slice of its weight is rows of its matrix
CASES = [
    (nn.Linear(5, 3), torch.randn(2, 5), True),
    (nn.Conv2d(3, 4, (2, 3)), torch.randn(2, 3, 4, 4), True),
    (nn.Embedding(7, 3), torch.randint(7, (2, 3)), True),
    (nn.Conv2d(4, 6, 2, groups=2), torch.randn(2, 4, 3, 3), False),
    (nn.ConvTranspose2d(4, 6, 2, groups=2), torch.randn(2, 4, 2, 2), False),
]


def rows_of(dense, split_dim):
    """Rows of the blocks of dense matrices, one by one."""
    found = []
    for matrix in as_list(dense):
        size = split_dim or len(matrix)
        found += [row[i // size * size :][:size] for i, row in enumerate(matrix)]
    width = max(map(len, found))
    return torch.stack([F.pad(row, (0, width - len(row))) for row in found])


@pytest.mark.parametrize("split_dim", [None, 1, 2, 4])
def test_rows_of_the_state_are_rows_of_the_blocks(split_dim):
    for layer, x, is_by_rows in CASES:
        model = nn.Sequential(layer)
        optimizer = refreshed(model, x, lambda y: y.square().sum(), split_dim=split_dim)
        state, curvature = optimizer.state[layer.weight], optimizer.curvature["0"]
        for side, *both in zip("AG", curvature.factors(), curvature.inverses(), strict=True):
            size = 1 if side == "A" and curvature.kind.diagonal_input else split_dim
            for key, dense in zip((side, f"{side}_inverse"), both, strict=True):
                assert torch.equal(state[key], rows_of(dense, size)), (layer, key)
        assert ("row_shards" in state) == is_by_rows, layer
        model.zero_grad()
