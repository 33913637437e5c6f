"""What is timed, how often, and which number counts; no test asks the clock itself."""

import pytest
import torch

from torch_thor.curvature.inverse import damped_inverses
from torch_thor.split import timing

CPU = torch.device("cpu")


@pytest.fixture
def scripted(monkeypatch):
    """Replace clock and inversion: each call takes what the script says for its block size, and is recorded."""

    def install(script):
        clock, calls = [0.0], []

        def invert(factors):
            shapes = [tuple(tuple(part.shape) for part in factor.parts()) for factor, _ in factors]
            size = max(shape[0][-1] for shape in shapes)
            calls.append((size, shapes))
            clock[0] += script[size].pop(0) if len(script[size]) > 1 else script[size][0]

        monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
        monkeypatch.setattr(timing, "damped_inverses", invert)
        return calls

    return install


def measure(sizes, split_dims):
    return timing.inverse_seconds(sizes, split_dims, dtype=torch.float32, device=CPU)


def test_all_blocks_of_the_model_are_inverted_at_once(scripted):
    calls = scripted({1: [1.0], 4: [1.0], 10: [1.0]})
    measure([(1, 10), (3, 6)], (1, 4, 10))
    shapes = dict(calls)
    assert shapes[1] == [((10, 1, 1),), ((18, 1, 1),)]
    assert shapes[4] == [((2, 4, 4), (1, 2, 2)), ((3, 4, 4), (3, 2, 2))]
    assert shapes[10] == [((1, 10, 10),), ((3, 6, 6),)]


def test_the_median_without_the_first_round(scripted):
    scripted({4: [100.0, 3.0, 1.0, 50.0]})
    assert measure([(1, 8)], (4,)) == (3.0,)


def test_slow_candidates_are_timed_three_times_and_quick_ones_more_often_in_turns(scripted):
    calls = scripted({1: [0.2], 4: [10.0], 8: [1e-5]})
    assert measure([(1, 8)], (1, 4, 8)) == pytest.approx((0.2, 10.0, 1e-5), rel=1e-3)
    order = [size for size, _ in calls]
    assert {size: order.count(size) for size in (1, 4, 8)} == {1: 1 + 10, 4: 1 + 3, 8: 1 + 25}
    assert order[:12] == [1, 4, 8] * 4


def test_the_blocks_can_be_inverted(monkeypatch):
    results = []
    monkeypatch.setattr(timing, "damped_inverses", lambda factors: results.extend(damped_inverses(factors)))
    (seconds,) = measure([(2, 130)], (64,))
    assert seconds > 0
    assert results
    assert not any(one.raised or one.failed for one in results)
