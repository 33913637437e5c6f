"""Trainings give the bits that are on record; CONTRIBUTING.md says when they are recorded anew."""

import copy
import warnings

import pytest

from golden import compare, record
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
    for part in (f"{key}: float32 [16, 1, 3, 3]", "more is new", "'nothing' was recorded"):
        assert any(part in line for line in lines), part
    (line,) = differences("digits", golden, golden | {"settings": ["digits"]})
    assert "its settings were" in line


def test_another_machine_is_allowed_its_rounding_and_no_more(golden):
    elsewhere = golden | {"fingerprint": golden["fingerprint"] | {"processor": "another"}}
    assert other_machine(golden, elsewhere)
    moved = nudged(nudged(elsewhere, FIRST_STEPS, 5e-4), FIRST_STEPS + 1, 0.1)
    assert differences("digits", golden, moved) == []
    (line,) = differences("digits", golden, nudged(elsewhere, FIRST_STEPS, 2e-3))
    assert f"step {FIRST_STEPS} of 44" in line
    assert "0.001 is allowed on another machine" in line
    found, state = elsewhere | {"optimizer": {**elsewhere["optimizer"]}}, "state.2.momentum_buffer"
    found["optimizer"]["state.0.momentum_buffer"] += "x"
    found["optimizer"][state] = found["optimizer"][state].replace("float32", "float64")
    (line,) = differences("digits", golden, found)
    assert state in line


# ---- the numbers of the optimizers ---------------------------------------------------------------


@pytest.fixture
def recorded(golden, tmp_path, monkeypatch):
    """What record.py makes of the numbers where the run of digits gives a content now."""
    monkeypatch.setattr(compare, "FOLDER", tmp_path)
    compare.write("numbers", {"numbers": {"THOR": 4, "ThorMuon": 7}, "harmless": []})
    compare.write("digits", golden)

    def record_(now, *words):
        monkeypatch.setitem(record.RUNS, "digits", lambda: now)
        record.main([*words, "digits"])
        return compare.read("numbers")

    return record_


def test_other_bits_raise_the_number_of_the_optimizer_that_the_run_trains(recorded, golden):
    """Neither a rename nor another machine does."""
    renamed = copy.deepcopy(golden)
    renamed["settings"][-1] = "thresholds=[0.1,0.0022]"
    renamed["optimizer"]["state.0.velocity"] = renamed["optimizer"].pop("state.0.momentum_buffer")
    elsewhere = nudged(golden, 1, 0.1) | {"fingerprint": {"processor": "another"}}
    moved = nudged(elsewhere, 44, 1e-9)
    for now, number in ((renamed, 4), (elsewhere, 4), (moved, 5), (moved, 5)):
        assert recorded(now) == {"numbers": {"THOR": number, "ThorMuon": 7}, "harmless": []}
        assert compare.read("digits") == now


def test_a_move_is_declared_harmless_up_to_a_limit(recorded, golden):
    # what later losses differ by is the same rounding, amplified
    moved = nudged(nudged(golden, 40, 9e-8), 44, 1e-3)
    found = recorded(moved, "--harmless", "sums in another order")
    assert found["numbers"] == {"THOR": 4, "ThorMuon": 7}
    (declared,) = found["harmless"]
    assert declared["reason"] == "sums in another order"
    assert declared["moves"] == {"digits": pytest.approx(9e-8, rel=0.01)}
    before = compare.read("digits")
    shorter = {**before, "losses": before["losses"][:-1]}
    for far in (nudged(before, 3, 1.4e-7), nudged(before, 3, float("nan")), shorter):
        with pytest.raises(SystemExit, match=r"may move by 1\.2e-07 at most, .* that of digits"):
            recorded(far, "--harmless", "too far")
        assert compare.read("digits") == before
        assert compare.read("numbers") == found
