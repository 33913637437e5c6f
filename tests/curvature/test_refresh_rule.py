"""The trace rule in itself, what it tells, and what a stopped layer still costs: nothing."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, batches, listened_to, mlp, train, weights
from torch_thor import THOR
from torch_thor.curvature import Decision, RefreshEvent
from torch_thor.curvature.refresh import decide, trace_change

STREAM = batches(10)
STOP_AT_ONCE = (1e9, 1e8)  # Δ is never above ω1, and always below ω2
TAKE_ALL = (0.0, 0.0)


def test_the_borders_belong_to_keep():
    for change, thresholds, decision in (
        (0.01, (0.01, 0.001), Decision.KEEP),  # Δ = ω1
        (math.nextafter(0.01, 1), (0.01, 0.001), Decision.UPDATE),
        (0.001, (0.01, 0.001), Decision.KEEP),  # Δ = ω2
        (math.nextafter(0.001, 0), (0.01, 0.001), Decision.STOP),
        (0.5, (0.5, 0.5), Decision.KEEP),  # ω1 = Δ = ω2
        (0.0, (0.0, 0.0), Decision.KEEP),
        (math.ulp(0.0), (0.0, 0.0), Decision.UPDATE),
        (math.inf, (1e300, 0.0), Decision.UPDATE),
    ):
        assert decide(change, thresholds) is decision
    for now, before, change in ((3, 2, 0.5), (1, 2, 0.5), (-3, 2, 0.5), (2, -2, 0), (1.0, 0.0, math.inf)):
        assert trace_change(now, before) == change


# -------------------------------------------------------------------------------------- what it tells


class Scalar:
    """One weight, shown the input √a and the gradient 1: tr(F + λI) = a + 0.5."""

    def __init__(self, **options):
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
        options = {"lr": 0.0, "damping": 0.5, "update_interval": 1, "momentum": 0.0, **options}
        self.optimizer = THOR(self.model, **options)

    def show(self, a):
        self.model(torch.tensor([[a**0.5]], dtype=torch.float64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.last_refresh


def test_events_of_a_run():
    layer = Scalar(trace_thresholds=(0.01, 0.001), update_interval=2)
    told = [layer.show(a) for a in (1.0, 9.0, 4.0, 9.0, 4.02, 9.0, 4.001, 9.0, 9.0)]
    near = {"rel": 1e-9}
    assert [len(events) for events in told] == [1, 0, 1, 0, 1, 0, 1, 0, 0]
    events = [event for events in told for event in events]
    assert [(e.layer, e.step, e.decision) for e in events] == [
        ("0", 0, Decision.UPDATE), ("0", 2, Decision.UPDATE), ("0", 4, Decision.KEEP), ("0", 6, Decision.STOP),
    ]  # fmt: skip
    assert [e.trace for e in events] == pytest.approx([1.5, 4.5, 4.52, 4.501], **near)
    assert events[0].trace_change is None
    assert [e.trace_change for e in events[1:]] == pytest.approx([3 / 1.5, 0.02 / 4.5, 0.001 / 4.5], rel=1e-6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].step = 3


def test_events_agree_with_the_layers():
    model = mlp()
    optimizer = THOR(model, lr=0.1, update_interval=1, trace_thresholds=(0.1, 0.02))
    seen = {name: [] for name in optimizer.curvature}
    for batch in STREAM:
        train(model, optimizer, [batch])
        for event in optimizer.last_refresh:
            seen[event.layer].append(event)
    decisions = {event.decision for events in seen.values() for event in events}
    assert decisions == {Decision.UPDATE, Decision.KEEP, Decision.STOP}  # else this test shows little
    for name, layer in optimizer.curvature.items():
        assert sum(event.decision is Decision.UPDATE for event in seen[name]) == layer.refreshes
        assert (seen[name][-1].decision is Decision.STOP) == layer.stopped
        assert seen[name][-1].trace_change == layer.last_trace_change


@pytest.mark.filterwarnings("ignore:THOR, step")
def test_failed_refreshes_say_so():
    """Statistics of the first layer hold a NaN, or give a factor that no damping makes definite."""
    for first, what in itertools.product((True, False), ("nan", "indefinite")):
        model = mlp()
        optimizer = THOR(model, update_interval=1, trace_thresholds=TAKE_ALL)
        train(model, optimizer, STREAM[: 0 if first else 2])
        layer = optimizer.curvature["0"]
        done, (x, labels) = layer.refreshes, STREAM[0]
        nn.functional.cross_entropy(model(x), labels).backward()
        rows = layer.statistics.sums()[0].rows
        rows.fill_(math.nan) if what == "nan" else rows.neg_().mul_(1e6)
        optimizer.step()
        told = {event.layer: event for event in optimizer.last_refresh}
        assert [event.decision for event in told.values()] == [Decision.FAILED, Decision.UPDATE, Decision.UPDATE]
        assert told["0"].step == (0 if first else 2)
        assert (told["0"].trace_change is None) == (first or what == "nan")
        assert math.isnan(told["0"].trace) == (what == "nan")
        assert layer.refreshes == done


def test_what_told_nothing_tells_nothing():
    """A step that is refused or skipped, and a loaded state, decide nothing."""
    model = mlp()
    optimizer = having(THOR(model, update_interval=1), nonfinite="skip")
    assert optimizer.last_refresh == ()
    train(model, optimizer, STREAM[:1])
    assert len(optimizer.last_refresh) == 3
    assert all(isinstance(event, RefreshEvent) for event in optimizer.last_refresh)
    assert "last_refresh" not in str(optimizer.state_dict().keys())
    (model(STREAM[1][0]) * math.inf).sum().backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert optimizer.last_refresh == ()


# ----------------------------------------------------------------------------- what a stopped layer costs


def stopping(model, *names):
    """THOR that stops the named layers at their second refresh."""
    groups = [
        {
            "params": list(model.get_submodule(name).parameters()),
            "trace_thresholds": STOP_AT_ONCE if name in names else TAKE_ALL,
        }
        for name in ("0", "2", "4")
    ]
    return THOR(groups, model=model, lr=0.1, update_interval=2)


def test_a_stopped_layer_has_no_hook_and_gathers_nothing(monkeypatch):
    for names in ((), ("2",), ("2", "4"), ("0",), ("0", "2"), ("0", "2", "4")):
        model, gathered = mlp(), []
        optimizer = stopping(model, *names)
        train(model, optimizer, STREAM[:2])
        assert listened_to(model) == {"0", "2", "4"}  # the step to come decides
        train(model, optimizer, STREAM[2:3])
        assert {name for name, layer in optimizer.curvature.items() if layer.stopped} == set(names)
        assert listened_to(model) == set()
        train(model, optimizer, STREAM[3:4])
        assert listened_to(model) == {"0", "2", "4"} - {*names}
        for name, layer in optimizer.curvature.items():

            def gather(*args, name=name, seen=gathered, really=layer.statistics.gather, **options):
                seen.append(name)
                really(*args, **options)

            monkeypatch.setattr(layer.statistics, "gather", gather)
        train(model, optimizer, STREAM[4:])
        assert listened_to(model) == {"0", "2", "4"} - {*names}
        assert sorted(gathered) == [name for name in ("0", "2", "4") if name not in names for _ in range(3)]


def test_loading_a_stopped_state_takes_the_hooks_off_and_an_older_one_puts_them_back():
    for names in (("0", "2", "4"), ("0", "2")):
        model, fresh = mlp(), mlp()
        optimizer, other = stopping(model, *names), stopping(fresh, *names)
        train(model, optimizer, STREAM[:2])
        early = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, STREAM[2:4])
        other.load_state_dict(early)
        assert listened_to(fresh) == {"0", "2", "4"}
        fresh.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        assert listened_to(fresh) == {"0", "2", "4"} - {*names}
        train(fresh, other, STREAM[4:6])
        train(model, optimizer, STREAM[4:6])
        assert listened_to(fresh) == listened_to(model) == {"0", "2", "4"} - {*names}
        assert_same(weights(fresh), weights(model))
        other.load_state_dict(early)
        assert listened_to(fresh) == {"0", "2", "4"}
