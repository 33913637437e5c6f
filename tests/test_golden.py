"""Trainings give the bits that are on record; CONTRIBUTING.md says when they are recorded anew."""

import copy
import warnings

import pytest

from golden.compare import (
    FIRST_STEPS,
    FOLDER,
    content_of,
    differences,
    fingerprint,
    other_machine,
    read,
)
from golden.runs import RUNS, UnavailableError, end_ranks, settled


class OtherMachineWarning(UserWarning):
    """Golden runs were compared with a tolerance."""


@pytest.fixture(scope="module", autouse=True)
def _ranks():
    yield
    end_ranks()


@pytest.mark.parametrize("name", RUNS)
def test_every_bit_is_as_recorded(name):
    golden = read(name)
    assert golden is not None, f"{name} is not on record: python tests/golden/record.py {name}"
    try:
        with settled():
            now = content_of(RUNS[name]())
    except UnavailableError as error:
        pytest.skip(f"golden run {name}: {error}")
    if moved := other_machine(golden, now):
        warnings.warn(
            f"golden run {name} was recorded on another machine ({'; '.join(moved)}): the losses "
            f"of its first {FIRST_STEPS} steps are compared with a tolerance, and not bit for bit",
            OtherMachineWarning,
            stacklevel=1,
        )
    if found := differences(name, golden, now):
        remedy = (
            "Was the mathematics changed on purpose? Then record it anew, in a commit of its own:"
        )
        pytest.fail(
            "\n".join([*found, f"{remedy} python tests/golden/record.py {name}"]), pytrace=False
        )


def test_every_file_is_of_a_run():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(RUNS)


def test_runs_meet_every_decision():
    for name in ("digits", "two-ranks", "every-layer"):
        assert {line.split()[2] for line in read(name)["refreshes"]} == {
            "update",
            "keep",
            "stop",
        }, name


# ---- the comparison itself -----------------------------------------------------------------------


@pytest.fixture
def golden():
    return read("digits") | {"fingerprint": fingerprint()}


def nudged(content, step, by):
    """The same with another loss at a step."""
    found = copy.deepcopy(content)
    found["losses"][step - 1] = (float.fromhex(found["losses"][step - 1]) * (1 + by)).hex()
    return found


def test_every_bit_is_compared_and_the_first_step_that_differs_is_named(golden):
    assert differences("digits", golden, copy.deepcopy(golden)) == []
    found = nudged(nudged(golden, 7, 1e-7), 30, 1e-2)
    (line,) = differences("digits", golden, found)
    for part in ("digits: step 7 of 44 is the first", golden["losses"][6], found["losses"][6]):
        assert part in line
    found, key = copy.deepcopy(golden), "state.0.momentum_buffer"
    found["optimizer"][key] = found["optimizer"][key][:-1] + "x"
    found["optimizer"]["param_groups.0.lr"] += 1e-18
    found["model"]["more"] = 1
    found["refreshes"].append("43 0 update -")
    lines = differences("digits", golden, found)
    assert len(lines) == 4
    for part in (
        f"optimizer: {key}: float32 [16, 1, 3, 3]",
        "model: more is new",
        "refreshes: 'nothing' was recorded",
    ):
        assert any(part in line for line in lines), part
    (line,) = differences("digits", golden, golden | {"settings": ["digits"]})
    assert "its settings were" in line


def test_another_machine_is_allowed_its_rounding_and_no_more(golden):
    elsewhere = golden | {"fingerprint": golden["fingerprint"] | {"processor": "another"}}
    assert other_machine(golden, elsewhere) == [
        f"processor {golden['fingerprint']['processor']} there, another here",
    ]
    assert (
        differences(
            "digits", golden, nudged(nudged(elsewhere, FIRST_STEPS, 5e-4), FIRST_STEPS + 1, 0.1)
        )
        == []
    )
    (line,) = differences("digits", golden, nudged(elsewhere, FIRST_STEPS, 2e-3))
    assert f"step {FIRST_STEPS} of 44" in line
    assert "0.001 is allowed on another machine" in line
    found = copy.deepcopy(elsewhere)
    state = found["optimizer"]
    state["state.0.momentum_buffer"] = state["state.0.momentum_buffer"][:-1] + "x"
    state["state.2.momentum_buffer"] = state["state.2.momentum_buffer"].replace(
        "float32", "float64"
    )
    (line,) = differences("digits", golden, found)
    assert "state.2.momentum_buffer" in line
