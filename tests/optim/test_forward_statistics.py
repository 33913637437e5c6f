"""ThorMuon's A comes from forward passes: which of them count, and how many of their rows."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from comparing import having
from tiny import batches, cross_entropy, mlp, train
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


def loss_of(model, batch):
    x, labels = STREAM[batch] if isinstance(batch, int) else batch
    return cross_entropy(labels)(model(x))


def inputs(*numbers):
    return torch.cat([STREAM[number][0] for number in numbers])


SPOILT = torch.full_like(STREAM[0][0], torch.nan), STREAM[0][1]

# ------------------------------------------------------------------- one step; each case returns the rows that count


def one_pass(model, optimizer, reset):
    loss = loss_of(model, 3)
    assert {layer.statistics.rows for layer in optimizer.curvature.values()} == {0}
    loss.backward()
    assert {layer.statistics.rows for layer in optimizer.curvature.values()} == {8}
    return inputs(3)


def micro_batches(model, optimizer, reset):
    (x, labels), sizes = STREAM[3], (1, 5, 2)
    for part in zip(x.split(sizes), labels.split(sizes), strict=True):
        (loss_of(model, part) * len(part[0]) / len(x)).backward()
    return x


def given_up_after_the_backward_pass(model, optimizer, reset):
    """A batch with NaN, alone or after others of the same step: it reaches no factor."""
    loss_of(model, SPOILT).backward()
    reset()
    loss_of(model, 4).backward()
    loss_of(model, SPOILT).backward()
    reset()
    loss_of(model, 5).backward()
    return inputs(5)


def given_up_without_a_backward_pass(model, optimizer, reset):
    """`if not loss.isfinite(): optimizer.zero_grad(); continue`."""
    assert not loss_of(model, SPOILT).isfinite()
    reset()
    loss_of(model, 3).backward()
    return inputs(3)


def given_up_by_the_model(model, optimizer, reset):
    """`model.zero_grad()` tells the optimizer nothing: that no weight has a gradient does."""
    loss_of(model, 3).backward()
    model.zero_grad()
    loss_of(model, 4).backward()
    return inputs(4)


def differentiated_twice(model, optimizer, reset):
    loss = loss_of(model, 3)
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model, (STREAM[4][0][:2], STREAM[4][1][:2])).backward()
    return inputs(3, 4)[:10]


def evaluated(context, model, optimizer, reset):
    """Before the forward pass, between it and the backward pass, and after."""

    def evaluate():
        with context():
            model(torch.full((50, 5), torch.nan, dtype=torch.float64))

    evaluate()
    assert {layer.statistics.rows for layer in optimizer.curvature.values()} == {0}
    loss = loss_of(model, 3)
    evaluate()
    loss.backward()
    evaluate()
    return inputs(3)


def reset_between(model, optimizer, reset):
    loss = loss_of(model, 3)
    reset()
    optimizer.zero_grad()
    loss.backward()
    return inputs(3)


def two_views(model, optimizer, reset):
    """Two forward passes, one loss: the rows of both."""
    losses = [loss_of(model, (STREAM[i][0], STREAM[3][1])) for i in (3, 4)]
    reset()
    sum(losses).backward()
    return inputs(3, 4)


def two_forward_passes_before_the_gradients_of_the_first_are_reset(model, optimizer, reset):
    """Rows of forward passes that no backward pass separates count together."""
    reset()
    first, second = loss_of(model, 3), loss_of(model, 4)
    first.backward()
    reset()
    second.backward()
    return inputs(3, 4)


AFTER_A_RESET = [
    one_pass, micro_batches, given_up_after_the_backward_pass, given_up_without_a_backward_pass, given_up_by_the_model,
    differentiated_twice, partial(evaluated, torch.no_grad), partial(evaluated, torch.inference_mode),
]  # fmt: skip
RESET_WITHIN = [
    reset_between, two_views, two_forward_passes_before_the_gradients_of_the_first_are_reset
]  # fmt: skip


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("case", [*AFTER_A_RESET, *RESET_WITHIN])
def test_rows_count_when_their_backward_pass_comes(case, to_none):
    """In the first step and in later ones, where the gradients of the step before may still be there."""
    for steps in (0, 2):
        model = mlp()
        optimizer = Muon(model, **OPTIONS)
        reset = partial(optimizer.zero_grad, set_to_none=to_none)
        for i in range(steps):
            reset()
            loss_of(model, i).backward()
            optimizer.step()
        if case in AFTER_A_RESET:
            reset()
        rows = case(model, optimizer, reset)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        torch.testing.assert_close(A(optimizer), moment(rows))
        assert {layer.refreshes for layer in optimizer.curvature.values()} == {steps + 1}


def test_layers_that_are_not_due_and_frozen_ones_gather_nothing_while_others_do():
    model = mlp()
    groups = [{"params": list(model[0].parameters()), "update_interval": 5}, {"params": list(model[2:].parameters())}]
    optimizer = Muon(groups, model=model, **{**OPTIONS, "update_interval": 2})
    train(model, optimizer, STREAM[:1])
    for expected in ([0, 0, 0], [0, 8, 0]):
        loss_of(model, 1).backward()
        assert [layer.statistics.rows for layer in optimizer.curvature.values()] == expected
        optimizer.step()
        optimizer.zero_grad()
        model[4].requires_grad_(False)
    torch.testing.assert_close(A(optimizer), moment(STREAM[0][0]))


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
    """A layer of each kind that knows rows: linear, an attention's projections, a recurrent layer's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.LSTM(6, 3, batch_first=True)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        self.seen = h.detach()
        y = self.attention(h, h, h, need_weights=False)[0]
        self.attended = y.detach()
        return self.rnn(y)[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("count", "length"),
    [(3, 5), (204, 5), (205, 5), (409, 5), (410, 5), (700, 3), (1023, 1), (1024, 1), (2047, 1), (2048, 1), (4099, 1)],
)
def test_about_a_thousand_rows_evenly_spread(count, length, masked):
    """Every k-th row of those that count, k the largest number that leaves 1024 of them and visits every place."""
    model = Sequences().double()
    x = torch.randn(count, length, 4).double() * torch.linspace(1, 3, count * length).double().view(count, length, 1)
    keep = torch.rand(count, length) < 0.8 if masked else torch.ones(count, length, dtype=torch.bool)
    optimizer = after_a_step(model, x, row_mask=keep if masked else None)

    def chosen(rows):
        rows = rows[keep]
        every = max(k for k in range(1, max(len(rows) // 1024, 1) + 1) if math.gcd(k, length) == 1)
        return moment(torch.stack([row for i, row in enumerate(rows) if i % every == 0]))

    torch.testing.assert_close(A(optimizer, "linear"), chosen(x))
    for part in ("q", "k", "v"):
        torch.testing.assert_close(A(optimizer, f"attention.{part}_proj"), chosen(model.seen))
    torch.testing.assert_close(A(optimizer, "rnn.weight_ih_l0"), chosen(model.attended))


@pytest.mark.parametrize(
    ("images", "side"), [(1, 40), (5, 12), (9, 12), (10, 12), (11, 12), (20, 12), (31, 12), (300, 4), (600, 4)]
)
def test_about_a_thousand_patches_of_all_images(images, side):
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2, bias=False), nn.Flatten(), nn.LazyLinear(2)).double()
    x = torch.randn(images, 2, side, side).double() * torch.linspace(1, 3, images).double().view(-1, 1, 1, 1)
    model(x)
    optimizer = after_a_step(model, x)
    pixels = (side // 2) ** 2
    every = max(images * pixels // 1024, 1)
    rows = torch.arange(0, images * pixels, every)
    if every > 1:  # other places in each image, shifted by the golden ratio
        image = rows // pixels
        rows = image * pixels + (rows + image * pixels * 618034 // 1000000) % pixels
    patches = nn.functional.unfold(x, 3, padding=1, stride=2)
    torch.testing.assert_close(A(optimizer), moment(patches.mT.flatten(0, 1)[rows]))


@pytest.mark.parametrize(("split_dim", "every"), [(64, 3), (150, 2), (200, 2), (210, 1), (None, 1)])
def test_large_blocks_take_eight_rows_a_column(split_dim, every):
    """3300 rows of 300 columns: 1024 are enough for small blocks, eight times its columns for a larger one."""
    model = nn.Sequential(nn.Linear(300, 2)).double()
    x = torch.randn(3300, 300).double() * torch.linspace(1, 3, 3300).double()[:, None]
    optimizer = after_a_step(model, x, split_dim=split_dim)
    size = split_dim or 300
    wanted = torch.block_diag(*(moment(part[::every]) for part in x.split(size, dim=1)))
    torch.testing.assert_close(A(optimizer), wanted)


def test_each_micro_batch_has_rows_enough_and_thor_takes_all():
    """3000 rows come as 1500 (every second) + 700 (all). THOR's T is the number of rows by that of loss terms."""
    [(x, labels)] = batches(1, size=3700)
    for make, rows in ((Muon, torch.cat([x[:3000:2], x[3000:]])), (THOR, x)):
        model = mlp()
        optimizer = make(model, **OPTIONS)
        for part in (slice(0, 3000), slice(3000, 3700)):
            loss_of(model, (x[part], labels[part])).backward()
        optimizer.step()
        torch.testing.assert_close(A(optimizer), moment(rows))
