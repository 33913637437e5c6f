"""Interval schedules: their values, what they refuse, and that saved states keep them."""

import copy
import io

import pytest
import torch

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR
from torch_thor.intervals import Constant, Geometric, Piecewise

STREAM = batches(14)
EDGES = {"boundaries": [0.5, 1.5], "intervals": [1, 2, 4], "steps_per_epoch": 4}
# as a program gives them, as checkpoints and recipes hold them, and when they refresh in 14 steps
SCHEDULES = {
    "constant": (Constant(3), {"kind": "constant", "interval": 3}, [0, 3, 6, 9, 12]),
    "epochs": (
        Piecewise(**EDGES),
        {"kind": "piecewise", **EDGES},
        [0, 1, 2, 4, 6, 10],
    ),
    "geometric": (
        Geometric(1, 4, factor=1.5),
        {"kind": "geometric", "first": 1, "last": 4, "factor": 1.5},
        [0, 1, 2, 4, 7, 11],  # 1, 1.5, 2, 3, 4.5 -> 4
    ),
}


def build(interval):
    torch.manual_seed(3)
    model = mlp()
    return model, THOR(model, update_interval=interval, trace_thresholds=(0.0, 0.0))


def refreshes(model, optimizer, stream=STREAM):
    """The steps that refreshed, by the optimizer's own count."""
    steps = []
    for batch in stream:
        train(model, optimizer, [batch])
        steps += sorted({event.step for event in optimizer.last_refresh})
    return steps


def test_piecewise_changes_at_its_boundaries():
    schedule = Piecewise([3, 10], [1, 20, 5])
    assert [schedule(step) for step in (0, 2, 3, 9, 10, 10**6)] == [1, 1, 20, 20, 5, 5]
    epochs = Piecewise([1, 2.5], [7, 8, 9], steps_per_epoch=100)
    assert [epochs(step) for step in (99, 100, 249, 250)] == [7, 8, 8, 9]


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (Constant, (2.0,), "interval=2.0"),
        (Piecewise, ([5], [1]), "one more than there are boundaries"),
        (Piecewise, ([5, 5], [1, 2, 3]), "must be above 0 and rise"),
        (Geometric, (5, 4, 2), "last=4.*first=5"),
        (Geometric, (5, 9, 1), "factor=1.*Constant"),
    ],
)
def test_what_is_refused(make, arguments, said):
    with pytest.raises(ValueError, match=said):
        make(*arguments)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_saved_schedule_goes_on_in_an_optimizer_with_a_number(name):
    schedule, plain, steps = SCHEDULES[name]
    whole, whole_optimizer = build(plain)
    assert refreshes(whole, whole_optimizer) == steps
    for stop in (0, 3, 5):
        model, optimizer = build(schedule)
        train(model, optimizer, STREAM[:stop])
        saved = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
        assert saved[1]["param_groups"][0]["update_interval"] == plain
        other, resumed = build(5)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert resumed.param_groups[0]["update_interval"] == schedule
        left = [step for step in steps if step >= stop]
        assert refreshes(other, resumed, STREAM[stop:]) == left
        assert_same(weights(other), weights(whole))


def test_a_function_is_not_saved_and_stays_whichever_side_has_it():
    def function(step):
        return 3

    for own in (4, SCHEDULES["geometric"][0], lambda step: 2):
        with_function, with_own = build(function)[1], build(own)[1]
        with_own.load_state_dict(saved_and_loaded(with_function.state_dict()))
        assert with_own.param_groups[0]["update_interval"] == own
        with_function.load_state_dict(saved_and_loaded(build(own)[1].state_dict()))
        assert with_function.param_groups[0]["update_interval"] is function


@pytest.mark.parametrize("interval", [0, "often", {"kind": "cosine"}], ids=str)
def test_an_invalid_interval_is_refused_wherever_it_comes_from(interval):
    said = r"update_interval=|kind must be one of"
    with pytest.raises(ValueError, match=said):
        build(interval)
    optimizer = build(3)[1]
    before = optimizer.state_dict()
    saved = copy.deepcopy(before)
    saved["param_groups"][0].update(update_interval=interval, lr=77.0)
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_each_group_has_its_own():
    model = mlp()
    optimizer = THOR(model[0].parameters(), model=model, update_interval=2)
    for layer, interval in ((model[2], Piecewise([1], [1, 3])), (model[4], lambda step: 5)):
        optimizer.add_param_group({"params": [*layer.parameters()], "update_interval": interval})
    due = {"0": [], "2": [], "4": []}
    for batch in STREAM[:8]:
        train(model, optimizer, [batch])
        for event in optimizer.last_refresh:
            due[event.layer].append(event.step)
    assert due == {"0": [0, 2, 4, 6], "2": [0, 1, 4, 7], "4": [0, 5]}


def test_an_interval_that_is_changed_between_steps_holds_from_the_next_refresh():
    for new in (2, Constant(2), lambda step: 2):
        model, optimizer = build(3)
        first = refreshes(model, optimizer, STREAM[:2])
        optimizer.param_groups[0]["update_interval"] = new
        assert first + refreshes(model, optimizer, STREAM[2:9]) == [0, 3, 5, 7]


def test_presets_are_the_papers():
    for name, thresholds in (
        ("thor", (0.01, 0.0)),
        ("thor_stop", (0.01, 0.001)),
        ("thor_nt", (0.0, 0.0)),
    ):
        optimizer = THOR(mlp(), **THOR.preset(name))
        assert optimizer.param_groups[0]["trace_thresholds"] == thresholds
    with pytest.raises(ValueError, match=r"'THOR'.*'thor', 'thor_stop', 'thor_nt'"):
        THOR.preset("THOR")
