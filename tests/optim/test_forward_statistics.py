"""ThorMuon's A comes from forward passes: how many of their rows count.

Which rows: tests/curvature/test_kinds.py; which passes: tests/capture/test_capture.py.
"""

import torch
from torch import nn

from tiny import TakesAll, batches, cross_entropy, mlp
from torch_thor import THOR

OPTIONS = {"update_interval": 1, "factor_decay": 0.0, "lr": 0.01}


def moment(rows):
    return rows.T @ rows / len(rows)


def test_large_blocks_take_eight_rows_a_column():
    """3300 rows of 300 columns: 1024 are enough for small blocks, eight times its columns for a
    larger one.
    """
    for split_dim, every in ((64, 3), (150, 2), (200, 2), (210, 1), (None, 1)):
        model = nn.Sequential(nn.Linear(300, 2)).double()
        x = torch.randn(3300, 300).double() * torch.linspace(1, 3, 3300).double()[:, None]
        optimizer = TakesAll(model, **OPTIONS, split_dim=split_dim)
        model(x).square().mean().backward()
        optimizer.step()
        wanted = torch.block_diag(
            *(moment(part[::every]) for part in x.split(split_dim or 300, dim=1))
        )
        torch.testing.assert_close(
            optimizer.curvature["0"].factors()[0], wanted, msg=f"{split_dim}"
        )


def test_each_micro_batch_has_rows_enough_and_thor_takes_all():
    """3000 rows come as 1500 (every second) + 700 (all)."""
    [(x, labels)] = batches(1, size=3700)
    for make, rows in ((TakesAll, torch.cat([x[:3000:2], x[3000:]])), (THOR, x)):
        model = mlp()
        optimizer = make(model, **OPTIONS)
        for part in (slice(0, 3000), slice(3000, 3700)):
            cross_entropy(labels[part])(model(x[part])).backward()
        optimizer.step()
        torch.testing.assert_close(optimizer.curvature["0"].factors()[0], moment(rows))
