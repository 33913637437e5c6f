"""The scale-free step's A comes from forward passes: which of them count, and how many of their rows."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiny import batches, cross_entropy, mlp, train
from torch_thor import THOR

STREAM = batches(6)
OPTIONS = {"scaling": "spectral", "update_interval": 1, "factor_decay": 0.0, "trace_thresholds": (0, 0), "lr": 0.01}


def moment(rows):
    rows = rows.reshape(-1, rows.shape[-1])
    return rows.T @ rows / len(rows)


def A(optimizer, name="0"):
    return optimizer.curvature[name].factors()[0]


def loss_of(model, batch):
    return cross_entropy(batch[1])(model(batch[0]))


def dropped_by_optimizer(_, optimizer):
    optimizer.zero_grad()


def zeroed_by_optimizer(_, optimizer):
    optimizer.zero_grad(set_to_none=False)


RESETS = {"dropped": dropped_by_optimizer, "zeroed": zeroed_by_optimizer}


def test_rows_count_when_their_backward_pass_comes():
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    loss = loss_of(model, STREAM[0])
    assert [layer.statistics.rows for layer in optimizer.curvature.values()] == [0, 0, 0]
    loss.backward()
    assert [layer.statistics.rows for layer in optimizer.curvature.values()] == [8, 8, 8]


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("steps", [0, 2])
def test_zero_grad_between_forward_and_backward_keeps_the_rows(reset, steps):
    """With no gradients yet, and with those of the step before still there."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    for batch in STREAM[: steps + 1]:
        loss = loss_of(model, batch)
        RESETS[reset](model, optimizer)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(A(optimizer), moment(batch[0]))
    assert all(layer.refreshes == steps + 1 for layer in optimizer.curvature.values())


def test_zero_grad_twice_between_forward_and_backward():
    """The gradients of the step before are still there in the forward pass."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    loss_of(model, STREAM[0]).backward()
    optimizer.step()
    loss = loss_of(model, STREAM[1])
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(STREAM[1][0]))


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("before", [0, 1])
def test_zero_grad_after_the_backward_pass_drops_the_rows(reset, steps, before):
    """A batch with NaN that the loop gives up, alone or after others of the same step: it reaches no factor."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    for batch in STREAM[:steps]:
        loss_of(model, batch).backward()
        optimizer.step()
        RESETS[reset](model, optimizer)
    spoilt = STREAM[4][0].clone()
    spoilt[0, 0] = torch.nan
    for batch in [*STREAM[3 : 3 + before], (spoilt, STREAM[4][1])]:
        loss_of(model, batch).backward()
    RESETS[reset](model, optimizer)
    loss_of(model, STREAM[5]).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(STREAM[5][0]))
    assert all(layer.refreshes == steps + 1 for layer in optimizer.curvature.values())


def test_rows_of_a_step_are_not_those_of_the_next():
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    for batch in STREAM:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(A(optimizer), moment(batch[0]))


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (1, 5, 2)])
def test_micro_batches_give_A_of_all_rows(sizes):
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    x, labels = STREAM[0]
    for x_part, labels_part in zip(x.split(sizes), labels.split(sizes), strict=True):
        (loss_of(model, (x_part, labels_part)) * len(x_part) / len(x)).backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(x))


@pytest.mark.parametrize("form", [{}, {"scaling": "spectral"}], ids=["natural", "spectral"])
@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant", "compiled"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("reset", RESETS)
def test_gradients_that_are_reset_before_the_next_backward_pass(form, mode, parts, reset):
    """Two losses, of which the first is given up when the forward pass of the second has run: that is a step of the
    second alone, whatever comes between (GAN, Lightning).
    """
    torch._dynamo.reset()
    model = Recomputed().double()
    twin = copy.deepcopy(model)
    model.mode = twin.mode = None if mode == "compiled" else mode if mode != "plain" else None
    run = torch.compile(model, backend="eager") if mode == "compiled" else model
    optimizer, other = (THOR(one, **{**OPTIONS, "scaling": None} | form) for one in (model, twin))
    for _ in range(3):
        spoilt = torch.full((6, 4, 5), math.nan, dtype=torch.float64)
        first, *rest = torch.randn(6, 4, 5).double().split(6 // parts)
        run(spoilt).square().sum().backward()
        loss = run(first).square().sum()
        RESETS[reset](model, optimizer)
        loss.backward()
        twin(first).square().sum().backward()
        for part in rest:
            run(part).square().sum().backward()
            twin(part).square().sum().backward()
        optimizer.step()
        other.step()
        other.zero_grad()
        for left, right in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)
    for name, layer in other.curvature.items():
        assert optimizer.curvature[name].refreshes == layer.refreshes == 3
        torch.testing.assert_close(A(optimizer, name), layer.factors()[0], rtol=1e-7, atol=1e-9)
    torch._dynamo.reset()


def test_two_forward_passes_before_the_gradients_of_the_first_are_reset():
    """Rows of forward passes that no backward pass separates count together."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    first, second = (loss_of(model, batch) for batch in STREAM[:2])
    first.backward()
    optimizer.zero_grad()
    second.backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(torch.cat([x for x, _ in STREAM[:2]])))


def test_gradients_that_the_model_drops():
    """`model.zero_grad()` tells the optimizer nothing: that no weight has a gradient does."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    loss_of(model, STREAM[0]).backward()
    model.zero_grad()
    loss_of(model, STREAM[1]).backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(STREAM[1][0]))


def test_forward_passes_before_one_backward_pass():
    """Two views of a batch, one loss: the rows of both."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    (x, labels), (other, _) = STREAM[:2]
    losses = [loss_of(model, (one, labels)) for one in (x, other)]
    optimizer.zero_grad()
    sum(losses).backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(torch.cat([x, other])))


def test_a_graph_that_is_differentiated_twice_counts_once():
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    (x, labels), (other, more) = STREAM[:2]
    loss = loss_of(model, (x, labels))
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model, (other[:2], more[:2])).backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(torch.cat([x, other[:2]])))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_leaves_nothing(context):
    """Before the forward pass, between it and the backward pass, and after."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)

    def evaluate():
        with context():
            model(torch.full((50, 5), torch.nan, dtype=torch.float64))

    evaluate()
    assert all(layer.statistics.rows == 0 for layer in optimizer.curvature.values())
    loss = loss_of(model, STREAM[0])
    evaluate()
    loss.backward()
    evaluate()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(STREAM[0][0]))


def test_between_refreshes_no_row_is_gathered():
    model = mlp()
    optimizer = THOR(model, **{**OPTIONS, "update_interval": 3})
    train(model, optimizer, STREAM[:1])
    for batch in STREAM[1:3]:
        loss_of(model, batch).backward()
        assert all(layer.statistics.rows == 0 for layer in optimizer.curvature.values())
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(A(optimizer), moment(STREAM[0][0]))


def test_a_layer_that_is_not_due_gathers_nothing_while_others_do():
    model = mlp()
    groups = [{"params": list(model[0].parameters()), "update_interval": 5}, {"params": list(model[2:].parameters())}]
    optimizer = THOR(groups, model=model, **OPTIONS)
    train(model, optimizer, STREAM[:1])
    loss_of(model, STREAM[1]).backward()
    assert [layer.statistics.rows for layer in optimizer.curvature.values()] == [0, 8, 8]


def test_a_frozen_layer_gathers_nothing():
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    model[0].requires_grad_(False)
    loss_of(model, STREAM[0]).backward()
    assert [layer.statistics.rows for layer in optimizer.curvature.values()] == [0, 8, 8]


def test_a_changed_input_has_been_seen_before_it_changed():
    """In place, after the layer: THOR's own step refuses that, here the rows are already added."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).double()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = THOR([p for p in model.parameters() if p.requires_grad], model=model, **OPTIONS)
    x = STREAM[0][0].clone()
    h = model[0](x)
    wanted = moment(h)
    model[1](h.clone()).sum().backward()
    h.zero_()
    optimizer.step()
    torch.testing.assert_close(A(optimizer, "1"), wanted)


# ---------------------------------------------------------------------------------- which rows


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


@pytest.mark.parametrize(
    ("count", "length"),
    [(3, 5), (204, 5), (205, 5), (409, 5), (410, 5), (700, 3), (1023, 1), (1024, 1), (2047, 1), (2048, 1), (4099, 1)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_about_a_thousand_rows_evenly_spread(count, length, masked):
    """Every k-th row of those that count, k the largest number that leaves 1024 of them and visits every place."""
    model = Sequences().double()
    optimizer = THOR(model, **OPTIONS)
    x = torch.randn(count, length, 4).double() * torch.linspace(1, 3, count * length).double().view(count, length, 1)
    keep = torch.rand(count, length) < 0.8 if masked else torch.ones(count, length, dtype=torch.bool)
    optimizer.row_mask = keep if masked else None
    model(x).square().mean().backward()
    optimizer.step()

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
    optimizer = THOR(model, **OPTIONS)
    model(x).square().mean().backward()
    optimizer.step()
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
    optimizer = THOR(model, split_dim=split_dim, **OPTIONS)
    x = torch.randn(3300, 300).double() * torch.linspace(1, 3, 3300).double()[:, None]
    model(x).square().mean().backward()
    optimizer.step()
    size = split_dim or 300
    wanted = torch.block_diag(*(moment(part[::every]) for part in x.split(size, dim=1)))
    torch.testing.assert_close(A(optimizer), wanted)


def test_each_micro_batch_has_rows_enough():
    """3000 rows come as 1500 (every second) + 700 (all)."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    [(x, labels)] = batches(1, size=3700)
    for part in (slice(0, 3000), slice(3000, 3700)):
        loss_of(model, (x[part], labels[part])).backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(torch.cat([x[:3000:2], x[3000:]])))


def test_the_first_of_its_own_step_takes_all_rows():
    """THOR's own step leaves none out: T is the number of rows by that of loss terms."""
    model = mlp()
    optimizer = THOR(model, update_interval=1)
    [(x, labels)] = batches(1, size=3000)
    loss_of(model, (x, labels)).backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(x))


# -------------------------------------------------------------------- activation checkpointing


class Recomputed(nn.Module):
    """A stack whose inside is recomputed in the backward pass; what is around it is not."""

    def __init__(self):
        super().__init__()
        self.mode = None
        self.first = nn.Linear(5, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.inside = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def inner(self, h):
        h = h + torch.tanh(self.conv(h.mT)).mT
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return torch.tanh(self.inside(h))

    def forward(self, x):
        h = self.first(x)
        h = self.inner(h) if self.mode is None else checkpoint(self.inner, h, use_reentrant=self.mode == "reentrant")
        return self.last(h)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)])
@pytest.mark.parametrize("late", [False, True])
def test_checkpointing_gives_the_same_A(mode, sizes, late):
    """Also where `zero_grad` comes between the passes."""
    plain = Recomputed().double()
    other = copy.deepcopy(plain)
    other.mode = mode
    one, two = THOR(plain, **OPTIONS), THOR(other, **OPTIONS)
    for _ in range(3):
        x = torch.randn(6, 4, 5).double()
        for model, optimizer in ((plain, one), (other, two)):
            for i, part in enumerate(x.split(sizes)):
                loss = model(part).square().sum()
                if late and i == 0:
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            if not late:
                optimizer.zero_grad()
    for name, layer in one.curvature.items():
        torch.testing.assert_close(A(two, name), layer.factors()[0], rtol=1e-7, atol=1e-9)
        assert two.curvature[name].refreshes == 3
    for left, right in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_a_layer_inside_and_outside_a_checkpointed_region_counts_each_row_once(mode):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x):
            inside = checkpoint(self.layer, x[:4].clone().requires_grad_(), use_reentrant=mode == "reentrant")
            return torch.cat([inside, self.layer(x[4:])])

    model = Twice().double()
    optimizer = THOR(model, **OPTIONS)
    x = torch.randn(12, 5).double()
    model(x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer, "layer"), moment(x))


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_loss_that_is_dropped_without_a_backward_pass_leaves_no_rows(reset, steps):
    """`if not loss.isfinite(): optimizer.zero_grad(); continue`."""
    model = mlp()
    optimizer = THOR(model, **OPTIONS)
    for batch in STREAM[:steps]:
        loss_of(model, batch).backward()
        optimizer.step()
        RESETS[reset](model, optimizer)
    spoilt = torch.full_like(STREAM[2][0], float("nan"))
    assert not loss_of(model, (spoilt, STREAM[2][1])).isfinite()
    RESETS[reset](model, optimizer)
    loss_of(model, STREAM[3]).backward()
    optimizer.step()
    torch.testing.assert_close(A(optimizer), moment(STREAM[3][0]))
