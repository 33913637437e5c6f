"""The trace rule by itself, what it tells, and that a stopped layer has no hooks."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from tiny import batches, listened_to, mlp, train
from torch_thor import THOR
from torch_thor.curvature import Decision
from torch_thor.curvature.refresh import decide

STREAM = batches(10)
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
        assert decide(change, thresholds) is decision, (change, thresholds)


def test_events_of_a_run():
    """A single weight sees the input √a and the gradient 1: tr(F + λI) = a + 0.5."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    optimizer = THOR(model, lr=0.0, damping=0.5, trace_thresholds=(0.01, 0.001), update_interval=2)
    layer, told = optimizer.curvature["0"], []
    for a in (1.0, 9.0, 4.0, 9.0, 4.02, 9.0, 4.001, 9.0, 9.0):
        model(torch.tensor([[a**0.5]], dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(optimizer.last_refresh)
        events = [event for of_step in told for event in of_step]
        assert layer.refreshes == sum(event.decision is Decision.UPDATE for event in events)
        assert layer.stopped == (events[-1].decision is Decision.STOP)
        assert layer.last_trace_change == events[-1].trace_change
    assert [len(of_step) for of_step in told] == [1, 0, 1, 0, 1, 0, 1, 0, 0]
    assert [(e.layer, e.step, e.decision) for e in events] == [
        ("0", 0, Decision.UPDATE), ("0", 2, Decision.UPDATE), ("0", 4, Decision.KEEP),
        ("0", 6, Decision.STOP),
    ]  # fmt: skip
    assert [e.trace for e in events] == pytest.approx([1.5, 4.5, 4.52, 4.501], rel=1e-9)
    assert events[0].trace_change is None
    changes = [3 / 1.5, 0.02 / 4.5, 0.001 / 4.5]
    assert [e.trace_change for e in events[1:]] == pytest.approx(changes, rel=1e-6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].step = 3


@pytest.mark.parametrize("stopped", [set(), {"2"}, {"0", "2"}, {"0", "2", "4"}])
def test_a_stopped_layer_has_no_hooks_until_an_older_state_is_loaded(stopped):
    """Some layers stop at their second refresh, where Δ is not above ω1 and below ω2."""
    every, model = {"0", "2", "4"}, mlp()
    groups = [
        {
            "params": [*model[int(name)].parameters()],
            "trace_thresholds": (1e9, 1e8) if name in stopped else TAKE_ALL,
        }
        for name in every
    ]
    optimizer = THOR(groups, model=model, lr=0.1, update_interval=2)
    train(model, optimizer, STREAM[:2])
    assert listened_to(model) == every  # the step to come decides
    early = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, STREAM[2:3])
    assert {name for name, layer in optimizer.curvature.items() if layer.stopped} == stopped
    assert listened_to(model) == set()
    for begin, end in ((3, 4), (4, 10)):
        train(model, optimizer, STREAM[begin:end])
        assert listened_to(model) == every - stopped
    for name, layer in optimizer.curvature.items():
        assert layer.refreshes == (1 if name in stopped else 5)
    optimizer.load_state_dict(early)
    assert listened_to(model) == every
