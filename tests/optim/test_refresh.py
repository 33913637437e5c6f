"""When a layer refreshes: the interval, and the trace rule on data made by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from tiny import batches, listened_to, mlp, train
from torch_thor import THOR

TAKE_ALL = {"trace_thresholds": (0.0, 0.0)}


class Scalar:
    """One weight, shown the input √`a` and the gradient √`g`: A = a, G = g and tr(F + λI) = ag + λ."""

    def __init__(self, **options):
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
        self.optimizer = THOR(
            self.model, **{"lr": 0.0, "damping": 0.5, "update_interval": 1, "momentum": 0.0, **options}
        )
        self.curvature = self.optimizer.curvature["0"]

    def show(self, a, g=1.0):
        x = torch.tensor([[a**0.5]], dtype=torch.float64)
        (self.model(x) * g**0.5).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def a(self):
        return self.curvature.factors()[0].item()

    @property
    def a_inverse(self):
        return self.curvature.inverses()[0].item()


# ------------------------------------------------------------------------------------------- interval


def steps_that_refresh(interval, steps):
    """Which steps took new factors, seen from the outside: A changes with every new input."""
    layer = Scalar(update_interval=interval, **TAKE_ALL)
    taken = []
    for step in range(steps):
        layer.show(10.0 * (step + 1))
        if layer.a == pytest.approx(10.0 * (step + 1)):
            taken.append(step)
    assert layer.curvature.refreshes == len(taken)
    return taken


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, list(range(12))),
        (3, [0, 3, 6, 9]),
        (5, [0, 5, 10]),
        (100, [0]),
        (lambda step: 4, [0, 4, 8]),
        (lambda step: step + 1, [0, 1, 3, 7]),
        (lambda step: 1 if step < 3 else 5, [0, 1, 2, 3, 8]),
    ],
)
def test_steps_that_refresh(interval, expected):
    assert steps_that_refresh(interval, 12) == expected


def test_callable_interval_is_asked_only_at_refreshes():
    asked = []

    def interval(step):
        asked.append(step)
        return 2 + step

    layer = Scalar(update_interval=interval, **TAKE_ALL)
    for a in range(1, 12):
        layer.show(a)
    assert sorted(set(asked)) == [0, 2, 6]


def test_callable_interval_that_gives_nonsense_is_refused():
    layer = Scalar(update_interval=lambda step: 0)
    with pytest.raises(ValueError, match="0"):
        layer.show(1.0)


def test_interval_changed_in_the_group():
    """It is asked at a refresh: 0 (then 3 steps), 3 (then 2), 5, 7."""
    layer = Scalar(update_interval=3, **TAKE_ALL)
    taken = []
    for step in range(9):
        if step == 2:
            layer.optimizer.param_groups[0]["update_interval"] = 2
        layer.show(10.0 * (step + 1))
        if layer.a == pytest.approx(10.0 * (step + 1)):
            taken.append(step)
    assert taken == [0, 3, 5, 7]


# ------------------------------------------------------------------------------------------ trace rule
# λ = 0.5 throughout: the first trace is 1.5


@pytest.mark.parametrize(
    ("thresholds", "a", "outcome"),
    [
        ((0.01, 0.0), 1.0149, "keep"),  # Δ = 0.0149 / 1.5 = 0.0099
        ((0.01, 0.0), 1.0151, "take"),
        ((0.01, 0.0), 0.9851, "keep"),  # falls as it rises
        ((0.01, 0.0), 0.9849, "take"),
        ((0.01, 0.0), 1.0, "keep"),  # Δ = 0 is not below ω2 = 0
        ((0.01, 0.001), 1.0014, "stop"),  # Δ = 0.0014 / 1.5 = 0.00093
        ((0.01, 0.001), 1.0016, "keep"),
        ((0.01, 0.001), 1.02, "take"),
        ((0.0, 0.0), 1.000001, "take"),
        ((0.0, 0.0), 1.0, "keep"),
        ((0.5, 0.5), 1.6, "stop"),
        ((0.5, 0.5), 1.9, "take"),
    ],
)
def test_take_keep_or_stop(thresholds, a, outcome):
    layer = Scalar(trace_thresholds=thresholds)
    layer.show(1.0)
    assert (layer.curvature.refreshes, layer.curvature.stopped) == (1, False)
    layer.show(a)
    assert layer.curvature.last_trace_change == pytest.approx(abs(a - 1) / 1.5, rel=1e-9, abs=1e-15)
    assert layer.curvature.stopped == (outcome == "stop")
    assert layer.curvature.refreshes == (2 if outcome == "take" else 1)
    assert layer.a == pytest.approx(a if outcome == "take" else 1.0, rel=1e-12)


def test_first_refresh_always_takes():
    layer = Scalar(trace_thresholds=(1e9, 1e8))
    layer.show(3.0)
    assert layer.a == pytest.approx(3.0)
    assert not layer.curvature.stopped
    assert layer.curvature.last_trace_change is None or np.isnan(layer.curvature.last_trace_change)


def test_before_means_the_factors_in_use():
    """1 → 1.01 (kept) → 1.02: the last is 0.0133 from the factors in use, but 0.0066 from those seen last."""
    layer = Scalar()
    for a in (1.0, 1.01, 1.02):
        layer.show(a)
    assert layer.curvature.refreshes == 2
    assert layer.a == pytest.approx(1.02)


def test_traces_multiply():
    """tr(A ⊗ G) = tr(A) tr(G): a twice and g half as large is no change at all."""
    layer = Scalar(trace_thresholds=(1e-9, 0.0))
    layer.show(1.0, 1.0)
    layer.show(2.0, 0.5)
    assert layer.curvature.last_trace_change == pytest.approx(0.0, abs=1e-14)
    assert layer.curvature.refreshes == 1


def test_damping_counts_once_for_every_weight():
    """3 × 2 weights, λ = 1: the trace is tr(A) tr(G) + 6. With tr(A) tr(G) from 1 to 1.05, Δ = 0.05 / 7."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False)).double()
    optimizer = THOR(model, lr=0.0, damping=1.0, update_interval=1)
    for a in (1.0, 1.05):
        (model(torch.tensor([[a**0.5, 0.0]], dtype=torch.float64))[:, 0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.curvature["0"].last_trace_change == pytest.approx(0.05 / 7)
    assert optimizer.curvature["0"].refreshes == 1


def test_current_damping_stands_in_both_traces():
    """A scheduled damping is no change of the layer."""
    layer = Scalar(trace_thresholds=(1e-9, 0.0))
    layer.show(1.0)
    layer.optimizer.param_groups[0]["damping"] = 0.1
    layer.show(1.0)
    assert layer.curvature.last_trace_change == pytest.approx(0.0, abs=1e-14)
    layer.show(1.11)
    assert layer.curvature.last_trace_change == pytest.approx(0.1)


def test_kept_layer_keeps_its_old_inverse_and_damping():
    layer = Scalar()
    layer.show(1.0)
    inverse = layer.a_inverse
    assert inverse == pytest.approx(1 / (1 + 0.5**0.5))
    layer.optimizer.param_groups[0]["damping"] = 7.0
    layer.show(1.001)
    assert layer.a_inverse == inverse


def test_stopped_is_for_ever():
    layer = Scalar(trace_thresholds=(0.01, 0.001))
    for a in (1.0, 1.0, 50.0, 900.0):
        layer.show(a)
    assert layer.curvature.stopped
    assert layer.curvature.refreshes == 1
    assert layer.a == pytest.approx(1.0)


def test_each_layer_decides_for_itself():
    """Two branches: one sees the same data again, the other does not."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.still = nn.Linear(1, 1, bias=False)
            self.moving = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            return self.still(torch.ones_like(x)) + self.moving(x)

    model = Branches().double()
    optimizer = THOR(model, lr=0.0, update_interval=1, trace_thresholds=(0.01, 0.001))
    for a in (1.0, 2.0, 3.0):
        model(torch.full((4, 1), a, dtype=torch.float64)).sum().div(4).backward()
        optimizer.step()
        optimizer.zero_grad()
    still, moving = optimizer.curvature["still"], optimizer.curvature["moving"]
    assert (still.stopped, still.refreshes) == (True, 1)
    assert (moving.stopped, moving.refreshes) == (False, 3)


def test_running_average_of_taken_factors():
    """β = 0.25: 4, then 0.25 · 4 + 0.75 · 8 = 7; a kept refresh adds nothing."""
    layer = Scalar(factor_decay=0.25)
    layer.show(4.0)
    assert layer.a == pytest.approx(4.0)
    layer.show(8.0)
    assert layer.a == pytest.approx(7.0)
    layer.show(7.0)
    assert layer.curvature.last_trace_change == pytest.approx(0.0, abs=1e-12)
    assert layer.a == pytest.approx(7.0)
    layer.show(11.0)
    assert layer.a == pytest.approx(10.0)


def test_average_comes_before_damping():
    layer = Scalar(factor_decay=0.25)
    layer.show(4.0)
    layer.show(8.0)
    assert layer.a_inverse == pytest.approx(1 / (7 + 0.5**0.5))


def test_what_is_shown_is_a_copy_of_the_truth():
    """`factors()` and `inverses()` are for looking: writing to them must not steer the training."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    optimizer, other = THOR(model), THOR(twin)
    stream = batches(3)
    train(model, optimizer, stream[:1])
    train(twin, other, stream[:1])
    for curvature in optimizer.curvature.values():
        for tensor in (*curvature.factors(), *curvature.inverses()):
            tensor.fill_(1e6)
    train(model, optimizer, stream[1:])
    train(twin, other, stream[1:])
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def test_looking_before_the_first_step_changes_nothing():
    """A user prints the curvature before training; so does a logger."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    optimizer, other = THOR(model), THOR(twin)
    for curvature in optimizer.curvature.values():
        repr(curvature)
        assert (curvature.refreshes, curvature.stopped, curvature.last_trace_change) == (0, False, None)
        assert not curvature.rows_per_term
        with pytest.raises(RuntimeError, match="no factors"):
            curvature.factors()
        with pytest.raises(RuntimeError, match="no factors"):
            curvature.inverses()
    train(model, optimizer, batches(3))
    train(twin, other, batches(3))
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def test_looking_makes_no_state():
    """A state, however empty, would keep torch.distributed.checkpoint from making the real one."""
    optimizer = THOR(mlp())
    assert [curvature.refreshes for curvature in optimizer.curvature.values()] == [0, 0, 0]
    assert not optimizer.state


class Reshaping(nn.Module):
    """The first layer sees N rows, the second 3 N: T = 1 and T = 3."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 6, bias=False)
        self.second = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).reshape(-1, 2))


def test_stopped_first_layer_still_counts_the_loss_terms():
    """N is the batch's, whichever layers are being refreshed: T of the second layer must not jump to 1."""
    model = Reshaping().double()
    x = torch.randn(4, 2).double()
    optimizer = THOR(
        [
            {"params": [model.first.weight], "trace_thresholds": (1e9, 1e8)},
            {"params": [model.second.weight], "trace_thresholds": (0.0, 0.0)},
        ],
        model=model,
        lr=0.0,
        update_interval=1,
    )
    for scale in (1.0, 2.0, 3.0):
        (scale * model(x).sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.curvature["first"].stopped
    assert optimizer.curvature["second"].refreshes == 3
    assert optimizer.curvature["second"].rows_per_term == 3
    G = optimizer.curvature["second"].factors()[1]
    torch.testing.assert_close(G, torch.full_like(G, 9.0))  # g = 3 in every row


def test_layers_of_different_intervals_share_the_loss_terms():
    """The second layer refreshes alone at step 1: N is still the batch size."""
    model = Reshaping().double()
    optimizer = THOR(
        [
            {"params": [model.first.weight], "update_interval": 100},
            {"params": [model.second.weight], "update_interval": 1},
        ],
        model=model,
        lr=0.0,
        trace_thresholds=(0.0, 0.0),
    )
    for scale in (1.0, 2.0):
        x = scale * torch.randn(4, 2).double()
        (scale * model(x).sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.curvature["first"].refreshes == 1
    assert optimizer.curvature["second"].refreshes == 2
    assert optimizer.curvature["second"].rows_per_term == 3


class Late(nn.Module):
    """A head that only some examples go through, from some step on."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.late = nn.Linear(3, 2, bias=False)
        self.chosen = None

    def forward(self, x):
        x = self.body(x)
        return x.sum() if self.chosen is None else x.sum() + self.late(x[self.chosen]).sum()


def test_layer_first_reached_between_refreshes_is_refreshed_in_the_next_step_with_all_loss_terms():
    """Its own leading dimension is 3, the batch's 12."""
    model = Late().double()
    optimizer = THOR(model, lr=0.0, update_interval=100)
    for step in range(5):
        model.chosen = slice(0, 3) if step >= 2 else None
        (model(torch.randn(12, 5).double()) / 12).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [event.layer for event in optimizer.last_refresh] == {0: ["body"], 3: ["late"]}.get(step, [])
        assert "late" not in listened_to(model) or step == 2  # hooks only where a refresh comes next
    late = optimizer.curvature["late"]
    assert late.rows_per_term == 3 / 12
    torch.testing.assert_close(late.factors()[1], torch.ones(2, 2).double())  # g = 1 in every row
