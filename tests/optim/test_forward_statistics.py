"""ThorMuon's A comes from forward passes: which of them count, and how many of their rows.

Which rows, for each kind of layer: tests/curvature/test_kinds_enough_rows.py.
"""

import math

import torch
from torch import nn

from comparing import having
from tiny import batches, cross_entropy, mlp
from torch_thor import THOR, ThorMuon

STREAM = batches(6)
OPTIONS = {"update_interval": 1, "factor_decay": 0.0, "lr": 0.01}


class Muon(ThorMuon):
    """Takes all new factors."""

    trace_thresholds = (0.0, 0.0)


def moment(rows):
    rows = rows.reshape(-1, rows.shape[-1])
    return rows.T @ rows / len(rows)


def A(optimizer, name="0"):
    return optimizer.curvature[name].factors()[0]


# What happens in one step, and the batches that count. ``3``, ``4``, ``5``: the forward pass of that batch, ``x`` of
# one with NaN, ``e`` of one that is evaluated; ``b``: the backward pass of the latest loss, ``k`` which keeps its
# graph, ``B`` of the first loss, ``s`` of the sum of all; ``z``: optimizer.zero_grad(), ``m``: model.zero_grad()
def test_a_changed_input_has_been_seen_before_it_changed():
    """In place, after the layer: THOR refuses that, here the rows are already added."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double()
    model[0].requires_grad_(False)
    optimizer = Muon(model[1].parameters(), model=model, **OPTIONS)
    h = model[0](STREAM[0][0])
    wanted = moment(h)
    model[1](h.clone()).sum().backward()
    h.zero_()
    optimizer.step()
    torch.testing.assert_close(A(optimizer, "1"), wanted)


# ---------------------------------------------------------------------------------- which rows


def after_a_step(model, x, row_mask=None, **options):
    optimizer = having(Muon(model, **OPTIONS, **options), row_mask=row_mask)
    model(x).square().mean().backward()
    optimizer.step()
    return optimizer


class Sequences(nn.Module):
    """Layers of kinds that know rows: linear, an attention's projections, a recurrent layer's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.LSTM(6, 3, batch_first=True)

    def forward(self, x):
        self.seen = torch.tanh(self.linear(x))
        self.attended = self.attention(self.seen, self.seen, self.seen, need_weights=False)[0]
        return self.rnn(self.attended)[0]


def test_about_a_thousand_rows_evenly_spread():
    """Every k-th row of those that count, k the largest number that leaves 1024 of them and visits every place."""
    for count, length in ((3, 5), (204, 5), (409, 5), (410, 5), (700, 3), (1023, 1), (2047, 1), (2048, 1)):
        for masked in (False, True):
            model = Sequences().double()
            x = torch.randn(count, length, 4).double() * torch.linspace(1, 3, count * length).view(count, length, 1)
            keep = torch.rand(count, length) < (0.8 if masked else 1.1)
            optimizer = after_a_step(model, x, row_mask=keep if masked else None)
            for names, seen in (
                (["linear"], x),
                ([f"attention.{part}_proj" for part in "qkv"], model.seen),
                (["rnn.weight_ih_l0"], model.attended),
            ):
                rows = seen.detach()[keep]
                every = max(k for k in range(1, max(len(rows) // 1024, 1) + 1) if math.gcd(k, length) == 1)
                for name in names:
                    torch.testing.assert_close(A(optimizer, name), moment(rows[::every]), msg=f"{count} {name}")


def test_large_blocks_take_eight_rows_a_column():
    """3300 rows of 300 columns: 1024 are enough for small blocks, eight times its columns for a larger one."""
    for split_dim, every in ((64, 3), (150, 2), (200, 2), (210, 1), (None, 1)):
        model = nn.Sequential(nn.Linear(300, 2)).double()
        x = torch.randn(3300, 300).double() * torch.linspace(1, 3, 3300).double()[:, None]
        optimizer = after_a_step(model, x, split_dim=split_dim)
        wanted = torch.block_diag(*(moment(part[::every]) for part in x.split(split_dim or 300, dim=1)))
        torch.testing.assert_close(A(optimizer), wanted, msg=f"{split_dim}")


def test_each_micro_batch_has_rows_enough_and_thor_takes_all():
    """3000 rows come as 1500 (every second) + 700 (all)."""
    [(x, labels)] = batches(1, size=3700)
    for make, rows in ((Muon, torch.cat([x[:3000:2], x[3000:]])), (THOR, x)):
        model = mlp()
        optimizer = make(model, **OPTIONS)
        for part in (slice(0, 3000), slice(3000, 3700)):
            cross_entropy(labels[part])(model(x[part])).backward()
        optimizer.step()
        torch.testing.assert_close(A(optimizer), moment(rows))
