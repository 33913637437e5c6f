"""Steps to a target, and smoothing."""

import pytest

from torch_thor.bench import running_mean, steps_to

RISING = [(10, 0.5), (20, 0.7), (30, 0.6), (40, 0.9)]
FALLING = [(10, 8.0), (20, 4.0), (30, 4.0)]


@pytest.mark.parametrize(
    ("target", "between", "at"),
    [(0.6, 15.0, 20.0), (0.7, 20.0, 20.0), (0.4, 10.0, 10.0), (0.8, 30 + 10 * 2 / 3, 40.0), (0.95, None, None)],
    ids=["between", "on_one", "before_the_first", "after_a_fall", "never"],
)
def test_the_first_step_that_reaches_a_target(target, between, at):
    assert steps_to(RISING, target) == (None if between is None else pytest.approx(between))
    assert steps_to(RISING, target, interpolate=False) == at


def test_lower_may_be_better():
    assert steps_to(FALLING, 5.0, higher=False) == 17.5
    assert steps_to(FALLING, 5.0, higher=False, interpolate=False) == 20
    assert steps_to(FALLING, 3.0, higher=False) is None
    assert steps_to([], 3.0) is None


def test_a_running_mean_takes_in_what_there_is():
    assert running_mean([1.0, 2.0, 3.0, 8.0], 0) == [1.0, 2.0, 3.0, 8.0]
    assert running_mean([1.0, 2.0, 3.0, 8.0], 2) == [1.0, 1.5, 2.0, 13 / 3]
