"""What is timed, how often, and which number counts; no test asks the clock itself."""

import pytest
import torch

from torch_thor.split import timing

CPU = torch.device("cpu")


@pytest.fixture
def scripted(monkeypatch):
    """Replace clock and inversion: each call takes what the script says for its block size, and is
    recorded.
    """

    def install(script):
        clock, calls = [0.0], []

        def invert(blocks):
            left = script[blocks.shape[-1]]
            clock[0] += left.pop(0) if len(left) > 1 else left[0]
            calls.append(tuple(blocks.shape))

        monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
        monkeypatch.setattr(timing, "invert", invert)
        return calls

    return install


def measure(sizes, split_dims):
    return timing.inverse_seconds(sizes, split_dims, dtype=torch.float32, device=CPU)


def test_all_blocks_of_one_size_are_inverted_at_once(scripted):
    calls = scripted({1: [5.0], 2: [7.0], 4: [11.0], 6: [13.0], 10: [17.0]})
    assert measure([(1, 10), (3, 6), (1, 4)], (1, 4, 10)) == (5.0, 7.0 + 11.0, 11.0 + 13.0 + 17.0)
    assert calls[0] == (10 + 18 + 4, 1, 1)
    assert sorted(calls[1:3]) == [(4, 2, 2), (6, 4, 4)]
    assert sorted(calls[3:6]) == [(1, 4, 4), (1, 10, 10), (3, 6, 6)]


def test_the_median_without_the_first_round(scripted):
    scripted({4: [100.0, 3.0, 1.0, 50.0]})
    assert measure([(1, 8)], (4,)) == (3.0,)


def test_slow_candidates_are_timed_three_times_and_quick_ones_more_often_in_turns(scripted):
    calls = scripted({1: [0.2], 4: [10.0], 8: [1e-5]})
    assert measure([(1, 8)], (1, 4, 8)) == pytest.approx((0.2, 10.0, 1e-5), rel=1e-3)
    order = [size for _, size, _ in calls]
    assert {size: order.count(size) for size in (1, 4, 8)} == {1: 1 + 10, 4: 1 + 3, 8: 1 + 25}
    assert order[:12] == [1, 4, 8] * 4


def test_matrices_are_orthogonalised_laid_wide_in_blocks_of_each_candidate(monkeypatch):
    calls, clock = [], [0.0]

    def unit_polars(matrices, rows):
        clock[0] += rows
        calls.append(([tuple(matrix.shape) for matrix in matrices], rows))

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "unit_polars", unit_polars)
    found = timing.orthogonal_seconds(
        [(1, 10, 4), (2, 3, 5)], (1, 4), dtype=torch.float32, device=CPU
    )
    assert found == (1.0, 4.0)
    assert calls[:2] == [([(1, 4, 10), (2, 3, 5)], 1), ([(1, 4, 10), (2, 3, 5)], 4)]


def test_what_is_timed_is_the_inverse_on_a_named_device():
    for size in (1, 5, 64):
        blocks = torch.eye(size, dtype=torch.float64).add(1 / size).repeat(3, 1, 1)
        expected = torch.eye(size, dtype=torch.float64).expand(3, size, size)
        torch.testing.assert_close(timing.invert(blocks) @ blocks, expected)
    assert timing.device_name(CPU) == f"{timing.processor_name()}, 1 thread"
