"""The network model of `torch-thor plan`, against times computed by hand."""

import pytest

from torch_thor.training import UserError
from torch_thor.training.reports.plan_network import (
    LINKS,
    Collective,
    Interconnect,
    Link,
    link_lines,
    parse_interconnect,
)

FAST, SLOW = Link(1000.0, 0.5), Link(10.0, 2.0)
REDUCE = Collective("reduce_scatter_tensor", 800, 200)
ALL = Collective("all_reduce", 800, 800)


def test_one_kind_of_link_is_one_ring():
    """Three rounds of 2 s, and three quarters of 800 bytes at 10 a second."""
    flat = Interconnect("", SLOW, SLOW, 8)
    assert flat.seconds(REDUCE, 4) == pytest.approx(3 * 2 + REDUCE.sent(4) / 10)
    assert flat.seconds(ALL, 4) == pytest.approx(2 * (3 * 2 + 600 / 10)) == pytest.approx(6 * 2 + ALL.sent(4) / 10)
    assert flat.seconds(ALL, 1) == 0
    assert flat.seconds(Collective("broadcast", 800, 800), 4) == pytest.approx(3 * 2 + 80)


def test_inside_of_nodes_and_then_between_them():
    """Four nodes of two: half of the bytes inside; then three quarters of the other half between."""
    both = Interconnect("", FAST, SLOW, 2)
    assert both.seconds(REDUCE, 8) == pytest.approx((0.5 + 400 / 1000) + (3 * 2 + 300 / 10))
    assert both.seconds(ALL, 8) == pytest.approx(2 * both.seconds(REDUCE, 8))
    assert both.seconds(REDUCE, 2) == pytest.approx(0.5 + 400 / 1000)
    assert both.seconds(Collective("broadcast", 800, 800), 8) == pytest.approx(0.5 + 3 * 2 + 80)
    assert both.seconds(REDUCE, 7) == both.seconds(REDUCE, 8)


def test_words():
    assert parse_interconnect("400g") == Interconnect("400g", LINKS["400g"], LINKS["400g"], 8)
    both = parse_interconnect(" nvlink+400g:4 ")
    assert (both.inside, both.between, both.node) == (LINKS["nvlink"], LINKS["400g"], 4)
    own = parse_interconnect("12.5GB/s@5us+500MB/s@1ms")
    assert own.inside == Link(12.5e9, pytest.approx(5e-6))
    assert own.between == Link(5e8, 1e-3)
    assert all(f"`{name}`" in link_lines() for name in LINKS)


@pytest.mark.parametrize(
    "word", ["infiniband", "nvlink+", "400g:4", "nvlink+400g:0", "a+b+c", "0GB/s@5us", "5GB@5us", "nvlink+400g:x", ""]
)
def test_other_words_get_one_line(word):
    with pytest.raises(UserError) as error:
        parse_interconnect(word)
    told = str(error.value)
    assert told.startswith(f"--interconnect={word}: must be LINK, or INSIDE+BETWEEN")
    assert "12.5GB/s@5us" in told
    assert "Known names: pcie4, pcie5" in told
    assert "\n" not in told
