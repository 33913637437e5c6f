"""Costs of a device: derived from times as computed by hand, and files of them."""

from collections import Counter

import pytest

from torch_thor.training import UserError
from torch_thor.training.reports.plan_costs import Line, line_through, make_costs, read_costs, write_costs

OTHERS = {
    "model": "mine",
    "split_dim": 4,
    "optimizer": "thor",
    "sample": "images",
    "local_batch": 4,
    "machine": {"device": "a device"},
}
SECONDS = {
    "ordinary 2": [5.0, 5.0, 90.0],
    "step 2": [1.0, 1.0, 1.0],
    "refresh 2": [20.0, 20.0, 20.0],
    "ordinary 4": [9.0, 9.0, 9.0],
    "step 4": [1.0, 1.0, 1.0],
    "refresh 4": [26.0, 26.0, 26.0],
    "pack": [0.5],
    "unpack": [0.25],
    "copy": [0.125],
}
INVERSIONS = [(1, 1, 1.0), (1, 11, 2.0), (4, 1, 4.0), (4, 11, 24.0)]


def costs():
    return make_costs(SECONDS, INVERSIONS, Counter({1: 11, 4: 2}), **OTHERS)


def test_costs_from_times():
    """Forward and backward 1 + 2n; blocks take 2 s and 6 s; so the rest of a refresh takes 6 and 8 s."""
    found = costs()
    assert found.forward_backward == Line(1.0, 2.0)
    assert found.step == 1.0
    assert found.inverting({1: 11, 4: 2}) == pytest.approx(2.0 + 6.0)
    assert (found.refresh.at(2), found.refresh.at(4)) == (pytest.approx(6.0), pytest.approx(8.0))
    assert (found.pack, found.unpack, found.copy) == (0.5, 0.25, 0.125)


def test_sizes_between_those_that_were_measured():
    """On logarithmic scales 2 is in the middle between 1 and 4."""
    found = costs()
    assert found.inverting({2: 1}) == pytest.approx((1.0 * 4.0) ** 0.5)
    assert found.inverting({2: 2}) == pytest.approx(2.0 + (0.1 * 2.0) ** 0.5)
    assert found.inverting({8: 1}) == pytest.approx(8.0)
    assert found.inverting({4: 0}) == 0


def test_no_negative_times():
    assert line_through((2, 8.0), (4, 4.0)) == Line(0.0, 1.0)
    assert line_through((2, 1.0), (4, 4.0)) == Line(0.0, 1.0)
    assert line_through((3, 6.0), (3, 6.0)) == Line(0.0, 2.0)


def test_files(tmp_path):
    path = tmp_path / "costs.json"
    write_costs(costs(), path)
    assert read_costs(path) == costs()


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "cannot be read (No such file"), ("{", "is no file of costs"), ("[]", "is no file"), ('{"a": 1}', "is no")],
)
def test_other_files_get_one_line(tmp_path, text, told):
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        read_costs(path)
    assert told in str(error.value)
    assert "write it with --save-costs" in str(error.value)
