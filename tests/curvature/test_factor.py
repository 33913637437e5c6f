"""The tensors of factors in the state of the weight: row i holds row i of its block, from the
block's first column on.

Layers that share a weight are in tests/capture/test_composites.py; what processes hold is in
tests/distributed.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tiny import as_list
from torch_thor import THOR
from torch_thor.curvature.kinds import kind_of

# layers whose weights can be divided by rows: a slice of the weight is a row of its matrix, or
# several
BY_ROWS = [
    (nn.Linear(5, 3), (2, 5)),
    (nn.Conv2d(3, 4, (2, 3)), (2, 3, 4, 4)),
    (nn.Embedding(7, 3), None),
    (nn.ConvTranspose1d(1, 1, 3), (2, 1, 3)),  # one row
]
NOT = [
    (nn.Conv2d(4, 6, 2, groups=2), (2, 4, 3, 3)),
    # as many inputs as outputs: one row of it could be either
    (nn.ConvTranspose2d(4, 4, 2), (2, 4, 2, 2)),
    (nn.ConvTranspose1d(3, 1, 2), (2, 3, 4)),
    (nn.ConvTranspose2d(4, 6, 2, groups=2), (2, 4, 2, 2)),
]


def rows_of(dense, split_dim):
    """Rows of the blocks of dense matrices, one by one."""
    found = []
    for matrix in as_list(dense):
        size = split_dim or len(matrix)
        for i, row in enumerate(matrix):
            first = i // size * size
            found.append(row[first : first + size])
    width = max(len(row) for row in found)
    return torch.stack([F.pad(row, (0, width - len(row))) for row in found])


def stepped(model, x, split_dim):
    optimizer = THOR(model, lr=0.0, split_dim=split_dim)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_rows_of_the_state_are_rows_of_the_blocks():
    """And whether a weight can be divided by rows is what the matrix of its numbers says."""
    for (layer, shape), split_dim in (
        (case, split) for case in BY_ROWS + NOT for split in (None, 1, 2, 4)
    ):
        x = torch.randint(7, (2, 3)) if shape is None else torch.randn(shape)
        optimizer, case = stepped(nn.Sequential(layer), x, split_dim), (layer, split_dim)
        state, curvature = optimizer.state[layer.weight], optimizer.curvature["0"]
        for side, dense, inverse in zip(
            "AG", curvature.factors(), curvature.inverses(), strict=True
        ):
            size = 1 if shape is None and side == "A" else split_dim
            assert torch.equal(state[side], rows_of(dense, size)), case
            assert torch.equal(state[f"{side}_inverse"], rows_of(inverse, size)), case
        weight = torch.arange(layer.weight.numel()).view(layer.weight.shape)
        rows = kind_of(layer).to_matrix(weight)
        is_by_rows = rows.shape == (1, len(weight), weight[0].numel()) and torch.equal(
            rows[0], weight.flatten(1)
        )
        assert is_by_rows == ("row_shards" in state) == any(layer is one for one, _ in BY_ROWS), (
            case
        )
