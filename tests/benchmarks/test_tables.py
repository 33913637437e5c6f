"""Tables, the numbers in them, and pictures: cells of several seeds, steps to a target, whole
files.
"""

import math

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks.runner.drawing import draw_band, save
from benchmarks.runner.markdown import table, with_error
from benchmarks.runner.numbers import apart, steps_to

RISING = [(10, 0.5), (20, 0.7), (30, 0.6), (40, 0.9)]
FALLING = [(10, 8.0), (20, 4.0), (30, 4.0)]


def test_a_table_has_a_cell_for_each_column():
    assert (
        table(("a", "b"), [("1", "2"), ("3", "4")]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |"
    )
    for row in (("1",), ("1", "2", "3")):
        with pytest.raises(ValueError, match=f"{len(row)} cells in a table of 2 columns"):
            table(("a", "b"), [("1", "2"), row])


@pytest.mark.parametrize(
    ("error", "mean", "cell"),
    [
        (0.0123, 1.5, "1.500 ± 0.012"), (0.0996, 1.5, "1.50 ± 0.10"), (0.0, 1.5, "1.5000 ± 0.0000"),
        (12.3, 150.0, "150 ± 12"), (123.0, 1500.0, "1500 ± 123"), (0.0123, -1.5, "-1.500 ± 0.012"),
        (1.9e-7, 2.4e-6, "(2.40 ± 0.19)e-6"), (2.5e-4, 2.6e-4, "(2.6 ± 2.5)e-4"),
        (2e-5, 9.99e-4, "(9.99 ± 0.20)e-4"),
    ],
)  # fmt: skip
def test_a_standard_error_has_two_digits(error, mean, cell):
    far = error * math.sqrt(3)  # the standard error of (-far, 0, far) is the error
    assert with_error([mean - far, mean, mean + far]) == cell


@pytest.mark.parametrize(
    ("points", "target", "step"),
    [
        (RISING, 0.6, 15), (RISING, 0.7, 20), (RISING, 0.4, 10), (RISING, 0.8, 30 + 10 * 2 / 3),
        (RISING, 0.95, None),
        (FALLING, 5.0, 17.5), (FALLING, 3.0, None), ([], 3.0, None),
    ],
    ids=["between", "on_one", "before_the_first", "after_a_fall", "never", "downwards",
    "never_down", "nothing"],
)  # fmt: skip
def test_the_first_step_that_reaches_a_target(points, target, step):
    found = steps_to(points, target, higher=points is RISING)
    assert found == (None if step is None else pytest.approx(step))


def test_two_runs_lie_apart_by_no_more_than_the_bound_in_19_of_20_cases():
    """The one is of the three seeds, the other is not."""
    draws = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0)).tolist()
    near = sum(abs(one - other) <= apart([one, *rest]) for one, *rest, other in draws)
    assert 0.95 < near / len(draws) < 0.97
    with pytest.raises(ValueError, match="2 values: give those of three seeds"):
        apart([1.0, 2.0])


def test_a_band_is_a_mean_and_the_range_of_more_than_one():
    axes = Figure().subplots()
    draw_band(axes, [0, 1], [[1.0, 2.0], [2.0, 3.0], [6.0, 10.0]], label="three")
    draw_band(axes, [0, 1], [[1.0, 2.0]], label="one")
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[3.0, 5.0], [1.0, 2.0]]
    (band,) = axes.collections
    assert {float(y) for _, y in band.get_paths()[0].vertices} == {1.0, 2.0, 6.0, 10.0}


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
    class Broken(Figure):
        def savefig(self, name, **options):
            name.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    path = tmp_path / "picture.png"
    save(Figure(figsize=(1, 1)), path)
    before = path.read_bytes()
    with pytest.raises(OSError, match="No space"):
        save(Broken(), path)
    assert path.read_bytes() == before != b""
