"""Tables and the cells of them that hold several seeds."""

import math
import statistics

import pytest

from torch_thor.bench.markdown import each, middle, number, reached, summary, table


def test_a_table():
    assert table(("a", "b"), [("1", "2"), ("3", "4")]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |"
    assert table(("a",), []) == "| a |\n|---|"


@pytest.mark.parametrize("row", [("1",), ("1", "2", "3")])
def test_a_row_has_a_cell_for_each_column(row):
    with pytest.raises(ValueError, match=f"{len(row)} cells in a table of 2 columns"):
        table(("a", "b"), [("1", "2"), row])


def test_what_was_not_reached_is_never():
    assert [number(value, ".1f") for value in (0.25, None, math.inf)] == ["0.2", "never", "never"]
    assert each([1.0, math.inf, None], ".1f") == "1.0, never, never"
    assert middle([1.0, math.inf, 3.0], ".1f") == "3.0 (1.0, never, 3.0)"
    assert middle([math.inf, math.inf, 3.0], ".1f") == "never (never, never, 3.0)"


def test_the_middle_is_the_median_or_what_is_said():
    assert middle([1.0, 2.0, 6.0], ".0f") == "2 (1, 2, 6)"
    assert middle([1.0, 2.0, 6.0], ".0f", of=statistics.fmean) == "3 (1, 2, 6)"


def test_cells_of_several_seeds():
    assert summary([0.5], ".2f") == "0.50"
    assert summary([1.0, 2.0, 3.0], ".1f") == "2.0 ± 1.0 (1.0, 2.0, 3.0)"
    assert reached([1.0, None], ".1f") == "1.0, never"
    assert reached([1.0, 3.0], ".1f") == f"2.0 ± {math.sqrt(2):.1f} (1.0, 3.0)"
