"""ThorMuon's A comes from forward passes: which of them count, and how many of their rows.

Which rows, for each kind of layer: tests/curvature/test_kinds_enough_rows.py.
"""

import math
import warnings

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


SPOILT = torch.full_like(STREAM[0][0], torch.nan)
# What happens in one step, and the batches that count. ``3``, ``4``, ``5``: the forward pass of that batch, ``x`` of
# one with NaN, ``e`` of one that is evaluated; ``b``: the backward pass of the latest loss, ``k`` which keeps its
# graph, ``B`` of the first loss, ``s`` of the sum of all; ``z``: optimizer.zero_grad(), ``m``: model.zero_grad()
PASSES = {
    "z3b": [3],
    "z3b4b": [3, 4],
    "zxbz4bxbz5b": [5],
    "zxz3b": [3],  # `if not loss.isfinite(): optimizer.zero_grad(); continue`
    "z3bm4b": [4],  # that tells the optimizer nothing: that no weight has a gradient does
    "z3kb4b": [3, 4],
    "ze3ebe": [3],
    "3zzb": [3],
    "34zs": [3, 4],
    "z34Bzb": [3, 4],  # forward passes that no backward pass separates count together
}


def play(events, model, optimizer, to_none):
    losses = []
    for event in events:
        if event in "345x":
            x, labels = STREAM[0 if event == "x" else int(event)]
            losses.append(cross_entropy(labels)(model(SPOILT if event == "x" else x)))
        elif event == "e":
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    model(SPOILT)
        elif event == "z":
            optimizer.zero_grad(set_to_none=to_none)
        elif event == "m":
            model.zero_grad()
        else:
            {"B": losses[0], "s": sum(losses)}.get(event, losses[-1]).backward(retain_graph=event == "k")


def test_rows_count_when_their_backward_pass_comes():
    """In the first step and in later ones, where the gradients of the step before may still be there."""
    for events, count in PASSES.items():
        for to_none, steps in ((True, 0), (True, 2), (False, 0), (False, 2)):
            model = mlp()
            optimizer = Muon(model, **OPTIONS)
            for i in range(steps):
                optimizer.zero_grad(set_to_none=to_none)
                cross_entropy(STREAM[i][1])(model(STREAM[i][0])).backward()
                optimizer.step()
            play(events, model, optimizer, to_none)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
            wanted = moment(torch.cat([STREAM[batch][0] for batch in count]))
            torch.testing.assert_close(A(optimizer), wanted, msg=f"{events} {to_none} {steps}")
            assert {layer.refreshes for layer in optimizer.curvature.values()} == {steps + 1}


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


def test_about_a_thousand_patches_of_all_images():
    """Every second of 60 images of 36 patches, at other places in each image, shifted by the golden ratio."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Flatten(), nn.Linear(108, 2)).double()
    x = torch.randn(60, 2, 12, 12).double() * torch.linspace(1, 3, 60).double().view(-1, 1, 1, 1)
    optimizer = after_a_step(model, x)
    rows = torch.arange(0, 60 * 36, 2)
    image = rows // 36
    rows = image * 36 + (rows + image * 36 * 618034 // 1000000) % 36
    patches = nn.functional.unfold(x, 3, padding=1, stride=2).mT.flatten(0, 1)
    torch.testing.assert_close(A(optimizer), moment(patches[rows]))


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
