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
from golden.runs import RUNS, RUNS_OF, UnavailableError, end_ranks, settled


@pytest.fixture(scope="module", autouse=True)
def _ranks():
    yield
    end_ranks()


SLOW = pytest.param("fashion-mnist", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [SLOW, *(name for name in RUNS if name != "fashion-mnist")])
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
            stacklevel=1,
        )
    if found := differences(name, golden, now):
        remedy = "Changed on purpose? Then record it anew, in a commit of its own, with"
        found.append(f"{remedy} python tests/golden/record.py {name}")
        pytest.fail("\n".join(found), pytrace=False)


def test_a_run_belongs_to_the_optimizer_that_it_trains_and_meets_every_decision():
    assert {path.stem for path in FOLDER.glob("*.json")} == {*RUNS, "numbers"}
    words = {"THOR": "thor", "ThorMuon": "thor-muon", "AGCSGD": "agc-sgd", "LAMB": "lamb"}
    for optimizer, own in RUNS_OF.items():
        named = {word for name in own for word in read(name)["settings"] if "optimizer=" in word}
        assert named == {f"optimizer={words[optimizer]}"}
    for name in ("digits", "two-ranks", "every-layer"):
        decisions = {line.split()[2] for line in read(name)["refreshes"]}
        assert decisions == {"update", "keep", "stop"}, name


@pytest.fixture
def golden():
    return read("digits") | {"fingerprint": fingerprint()}


def nudged(content, step, by):
    """The same content with another loss at a step."""
    found = copy.deepcopy(content)
    found["losses"][step - 1] = (float.fromhex(found["losses"][step - 1]) * (1 + by)).hex()
    return found


def test_every_bit_is_compared_and_the_first_step_that_differs_is_named(golden):
    assert differences("digits", golden, copy.deepcopy(golden)) == []
    found = nudged(nudged(golden, 7, 1e-7), 30, 1e-2)
    key = "state.0.momentum_buffer"
    found["optimizer"][key] = found["optimizer"][key][:-1] + "x"
    found["refreshes"].append("43 0 update -")
    step, refresh, state = differences("digits", golden, found)
    assert "digits: step 7 of 44 is the first" in step
    assert "'nothing' was recorded" in refresh
    assert f"{key}: float32 [16, 1, 3, 3]" in state


def test_another_machine_is_allowed_its_rounding_and_no_more(golden):
    elsewhere = golden | {"fingerprint": golden["fingerprint"] | {"processor": "another"}}
    assert other_machine(golden, elsewhere)
    moved = nudged(nudged(elsewhere, FIRST_STEPS, 5e-4), FIRST_STEPS + 1, 0.1)
    assert differences("digits", golden, moved) == []
    (line,) = differences("digits", golden, nudged(elsewhere, FIRST_STEPS, 2e-3))
    assert f"step {FIRST_STEPS} of 44" in line
