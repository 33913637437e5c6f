"""Interval schedules: what they say, what they refuse, and that state dicts keep them."""

import copy
import dataclasses
import io
import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR, ThorMuon, intervals

STREAM = batches(14)
SCHEDULES = {
    "constant": intervals.Constant(3),
    "piecewise": intervals.Piecewise([2, 6], [1, 2, 4]),
    "epochs": intervals.Piecewise([0.5, 1.5], [1, 2, 4], steps_per_epoch=4),
    "geometric": intervals.Geometric(1, 4, factor=1.5),
}
PLAIN = {  # as groups, checkpoints and recipes hold them
    "constant": {"kind": "constant", "interval": 3},
    "piecewise": {
        "kind": "piecewise",
        "boundaries": [2, 6],
        "intervals": [1, 2, 4],
        "steps_per_epoch": None,
    },
    "epochs": {
        "kind": "piecewise",
        "boundaries": [0.5, 1.5],
        "intervals": [1, 2, 4],
        "steps_per_epoch": 4,
    },
    "geometric": {"kind": "geometric", "first": 1, "last": 4, "factor": 1.5},
}
OTHER_NUMBERS = {
    "constant": {"interval": 100},
    "piecewise": {"intervals": [100, 200, 300]},
    "epochs": {"steps_per_epoch": 100},
    "geometric": {"first": 100, "last": 200},
}
REFRESHES = {  # of 14 steps, by hand
    "constant": [0, 3, 6, 9, 12],
    "piecewise": [0, 1, 2, 4, 6, 10],
    "epochs": [0, 1, 2, 4, 6, 10],
    "geometric": [0, 1, 2, 4, 7, 11],  # 1, 1.5, 2, 3, 4.5 -> 4
}


def build(interval, **options):
    torch.manual_seed(3)
    model = mlp()
    return model, THOR(model, update_interval=interval, trace_thresholds=(0.0, 0.0), **options)


def refreshes(model, optimizer, stream=STREAM):
    """The steps that refreshed, by the optimizer's own count."""
    steps = []
    for batch in stream:
        train(model, optimizer, [batch])
        steps += sorted({event.step for event in optimizer.last_refresh})
    return steps


# ------------------------------------------------------------------------------------ what they say


def test_steps_that_refresh():
    for name, schedule in SCHEDULES.items():
        assert refreshes(*build(schedule)) == REFRESHES[name]


def test_piecewise_changes_at_its_boundaries():
    schedule = intervals.Piecewise([3, 10], [1, 20, 5])
    assert [schedule(step) for step in (0, 2, 3, 9, 10, 10**6)] == [1, 1, 20, 20, 5, 5]
    epochs = intervals.Piecewise([1, 2.5], [7, 8, 9], steps_per_epoch=100)
    assert [epochs(step) for step in (99, 100, 249, 250)] == [7, 8, 8, 9]
    assert intervals.Piecewise([], [6])(10**9) == 6


def test_geometric_multiplies_on_each_refresh():
    """Where all terms are whole nothing is rounded: the interval of refresh j is first ·
    factor^j.
    """
    for first, factor, terms in ((1, 2, 12), (3, 3, 8), (16, 1.5, 5), (625, 1.2, 5)):
        schedule, step, exact = intervals.Geometric(first, 10**9, factor), 0, Fraction(first)
        for _ in range(terms):
            assert schedule(step) == exact
            step += schedule(step)
            exact *= Fraction(str(factor))


@given(
    first=st.integers(1, 1000),
    tenths=st.integers(11, 60),
    step=st.integers(0, 10**7),
    above=st.integers(0, 10**6),
)
def test_geometric_is_the_closed_form(first, tenths, step, above):
    factor = Fraction(tenths, 10)
    exact = min(Fraction(first + above), first + (factor - 1) * step)
    assert intervals.Geometric(first, first + above, tenths / 10)(step) == exact.__floor__()


def test_geometric_ends_at_one_refresh_an_epoch():
    """Once the bound is reached, refreshes are an epoch apart."""
    epoch, schedule, step, taken = 834, intervals.Geometric(20, 834, factor=1.3), 0, [0]
    while step < 20 * epoch:
        step += schedule(step)
        taken.append(step)
    gaps = [later - earlier for earlier, later in itertools.pairwise(taken)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 20
    assert set(gaps[-10:]) == {epoch}


def test_what_is_refused():
    for make, arguments, options, said in (
        (intervals.Constant, (0,), {}, "interval=0"),
        (intervals.Constant, (2.0,), {}, "interval=2.0"),
        (intervals.Constant, (True,), {}, "interval=True"),
        (intervals.Piecewise, (5, [1, 2]), {}, r"boundaries=5.*\[5\]"),
        (intervals.Piecewise, ([5], 3), {}, "intervals=3"),
        (intervals.Piecewise, ([5], [1]), {}, "one more than there are boundaries"),
        (intervals.Piecewise, ([5, 5], [1, 2, 3]), {}, "must be above 0 and rise"),
        (intervals.Piecewise, ([0], [1, 2]), {}, "must be above 0 and rise"),
        (intervals.Piecewise, ([1.5], [1, 2]), {}, "steps_per_epoch"),
        (intervals.Piecewise, ([float("nan")], [1, 2]), {"steps_per_epoch": 3}, "finite"),
        (intervals.Piecewise, ([5], [1, 0]), {}, "an interval=0"),
        (intervals.Piecewise, ([5], [1, 2]), {"steps_per_epoch": 0}, "steps_per_epoch=0"),
        (intervals.Geometric, (0, 5, 2), {}, "first=0"),
        (intervals.Geometric, (5, 4, 2), {}, "last=4.*first=5"),
        (intervals.Geometric, (5, 9, 1), {}, "factor=1.*Constant"),
        (intervals.Geometric, (5, 9, float("inf")), {}, "factor=inf"),
        (intervals.Geometric, (5, 9, "2"), {}, "factor='2'"),
    ):
        with pytest.raises(ValueError, match=said):
            make(*arguments, **options)


def test_schedules_are_values():
    for schedule in SCHEDULES.values():
        assert eval(repr(schedule), vars(intervals)) == schedule
        assert hash(schedule) == hash(copy.deepcopy(schedule))
        field = dataclasses.fields(schedule)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(schedule, field, 1)
    held = PLAIN["geometric"]
    assert f"update_interval: {held}" in repr(build(SCHEDULES["geometric"])[1])


# --------------------------------------------------------------------------------- saved and loaded


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_saved_schedule_goes_on_in_an_optimizer_with_a_number(name):
    """As every option does: what was saved holds."""
    whole, whole_optimizer = build(SCHEDULES[name])
    train(whole, whole_optimizer, STREAM)
    for stop in (0, 1, 3, 5, 9):
        model, optimizer = build(SCHEDULES[name])
        train(model, optimizer, STREAM[:stop])
        saved = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
        other, resumed = build(5)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert resumed.param_groups[0]["update_interval"] == SCHEDULES[name]
        assert refreshes(other, resumed, STREAM[stop:]) == [
            step for step in REFRESHES[name] if step >= stop
        ]
        assert_same(weights(other), weights(whole))


@pytest.mark.parametrize("name", SCHEDULES)
def test_groups_and_checkpoints_hold_dicts(name):
    """Also where a trainer saves the groups themselves; each group has a dict of its own."""
    for interval in (SCHEDULES[name], PLAIN[name]):
        model, optimizer = build(interval)
        train(model, optimizer, STREAM[:2])
        [group] = optimizer.param_groups
        held = group["update_interval"]
        assert isinstance(held, dict)
        assert held == PLAIN[name]
        assert held == SCHEDULES[name]
        assert not held != SCHEDULES[name]  # noqa: SIM202  # an operator of its own
        assert [held(step) for step in range(12)] == [SCHEDULES[name](s) for s in range(12)]
        assert held is not optimizer.defaults["update_interval"]
        saved = optimizer.state_dict()["param_groups"][0]["update_interval"]
        assert type(saved) is dict
        assert saved == PLAIN[name]
        plain = {key: value for key, value in group.items() if key != "params"}
        for copied in (saved_and_loaded([plain])[0], copy.deepcopy(plain)):
            assert copied["update_interval"] == PLAIN[name]
    assert refreshes(*build(PLAIN[name])) == REFRESHES[name]


def test_an_interval_that_is_changed_in_its_dict_counts_from_the_next_refresh():
    model, optimizer = build(SCHEDULES["constant"])
    first = refreshes(model, optimizer, STREAM[:2])
    optimizer.param_groups[0]["update_interval"]["interval"] = 2
    assert first + refreshes(model, optimizer, STREAM[2:9]) == [0, 3, 5, 7]
    assert optimizer.defaults["update_interval"] == PLAIN["constant"]
    optimizer.param_groups[0]["update_interval"]["interval"] = 0
    before = weights(model)
    with pytest.raises(ValueError, match=r"interval=0: interval must be .* ≥ 1; 1 refreshes"):
        train(model, optimizer, STREAM[9:12])
    assert_same(weights(model), before)


def test_saved_number_goes_on_in_an_optimizer_with_a_schedule():
    optimizer, other = build(4)[1], build(SCHEDULES["geometric"])[1]
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["update_interval"] == 4


def test_functions_are_the_programs():
    """No checkpoint holds them, so what the program gives stays, whichever side has one."""

    def function(step):
        return 3

    for own in (4, SCHEDULES["geometric"], lambda step: 2):
        with_function, with_own = build(function)[1], build(own)[1]
        assert with_function.state_dict()["param_groups"][0]["update_interval"] == "callable"
        with_own.load_state_dict(with_function.state_dict())
        assert with_own.param_groups[0]["update_interval"] == own
        with_function.load_state_dict(saved_and_loaded(build(own)[1].state_dict()))
        assert with_function.param_groups[0]["update_interval"] is function


def test_a_subclass_is_a_function():
    """Its repr would come back as something else."""

    class Mine(intervals.Constant):
        def __call__(self, step):
            return 2

    model, optimizer = build(Mine(5))
    assert optimizer.state_dict()["param_groups"][0]["update_interval"] == "callable"
    assert refreshes(model, optimizer, STREAM[:5]) == [0, 2, 4]


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ({"kind": "constant", "interval": 0}, "interval must be a whole number of steps ≥ 1"),
        ({"kind": "constant"}, "constant takes interval, not nothing"),
        ({"kind": "constant", "intervall": 3}, "constant takes interval, not intervall"),
        ({"kind": "geometric", "first": 5, "last": 4, "factor": 2}, "last must be first=5 or more"),
        ({"kind": "cosine"}, "kind must be one of constant, piecewise, geometric, as in"),
        ({}, "kind must be one of"),
        ("Constant(interval=3)", "must be a whole number of steps ≥ 1, or a schedule"),
        ("", "must be a whole number of steps ≥ 1, or a schedule"),
    ],
)
def test_what_is_no_interval_is_refused_wherever_it_comes_from(interval, said):
    model, optimizer = build(SCHEDULES["geometric"])
    train(model, optimizer, STREAM[:3])
    before = copy.deepcopy(optimizer.state_dict())
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(update_interval=interval, lr=77.0)
    said = f"(?s)update_interval=.*{said}"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    with pytest.raises(ValueError, match=said):
        build(interval)
    optimizer.param_groups[0]["update_interval"] = interval
    with pytest.raises(ValueError, match=said):
        train(model, optimizer, STREAM[3:4])


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_distributed_checkpoint_keeps_the_schedule(name, tmp_path):
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = build(SCHEDULES[name])
        train(model, optimizer, STREAM[:5])
        states = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=tmp_path / str(flat))
        # of the kind that was saved, because keys of checkpoints must be those of the program
        other, resumed = build({**PLAIN[name], **OTHER_NUMBERS[name]})
        target = {
            "model": other.state_dict(),
            "optimizer": get_optimizer_state_dict(other, resumed, options=options),
        }
        dcp.load(target, checkpoint_id=tmp_path / str(flat))
        other.load_state_dict(target["model"])
        set_optimizer_state_dict(other, resumed, target["optimizer"], options=options)
        assert resumed.param_groups[0]["update_interval"] == SCHEDULES[name]
        assert refreshes(other, resumed, STREAM[5:]) == [
            step for step in REFRESHES[name] if step >= 5
        ]


# ---------------------------------------------------------------------------------- groups, by hand


def test_each_group_has_its_own():
    model = mlp()
    optimizer = THOR(model[0].parameters(), model=model, update_interval=intervals.Constant(2))
    optimizer.add_param_group(
        {"params": list(model[2].parameters()), "update_interval": intervals.Piecewise([1], [1, 3])}
    )
    optimizer.add_param_group(
        {"params": list(model[4].parameters()), "update_interval": lambda step: 5}
    )
    due = {"0": [], "2": [], "4": []}
    for batch in STREAM[:8]:
        train(model, optimizer, [batch])
        for event in optimizer.last_refresh:
            due[event.layer].append(event.step)
    assert due == {"0": [0, 2, 4, 6], "2": [0, 1, 4, 7], "4": [0, 5]}
    with pytest.raises(ValueError, match="update_interval"):
        optimizer.add_param_group({"params": [], "update_interval": "often"})


def test_changed_in_the_group_between_steps():
    """It is asked at a refresh: 0 (then 3 steps), 3 (then 2), 5, 7."""
    for old, new in itertools.product(
        (3, intervals.Constant(3), lambda step: 3), (2, intervals.Constant(2), lambda step: 2)
    ):
        model, optimizer = build(old)
        first = refreshes(model, optimizer, STREAM[:2])
        optimizer.param_groups[0]["update_interval"] = new
        assert first + refreshes(model, optimizer, STREAM[2:9]) == [0, 3, 5, 7]


@pytest.mark.parametrize("method", [THOR, ThorMuon])
def test_a_refresh_that_is_brought_forward_by_hand(method):
    """The forward pass of step 2 gathers nothing, so step 3 refreshes, then step 8; stopped layers
    change nothing.
    """
    model = mlp()
    optimizer = method(model, update_interval=5)
    first = refreshes(model, optimizer, STREAM[:2])
    optimizer.state[model[0].weight]["stopped"] = 1
    optimizer.param_groups[0]["next_refresh"] = optimizer.param_groups[0]["step"]
    assert first + refreshes(model, optimizer, STREAM[2:9]) == [0, 3, 8]


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
