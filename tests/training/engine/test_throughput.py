"""Means, medians and shares of a stretch of steps, by hand."""

import math

import pytest

from replaying import accuracy_point
from torch_thor.training import History, RefreshPoint, StepPoint
from torch_thor.training.engine.throughput import Throughput, throughput

STEPS = [
    StepPoint(1, 3.0, 0.1, 5.0, 5.0, True, terms=10, waited=1.0),
    StepPoint(2, 2.0, 0.1, 6.0, 1.0, False, terms=10, waited=0.5),
    StepPoint(3, math.nan, 0.1, 8.0, 2.0, False, terms=10, waited=0.0, skipped=True),
    StepPoint(4, 1.0, 0.1, 12.0, 4.0, False, terms=10, waited=1.5),
]


def test_by_hand():
    assert throughput(STEPS) == Throughput(
        loss=2.0,
        terms_per_second=40 / 12,
        ordinary_seconds=2.0,
        refresh_seconds=5.0,
        waited_seconds=0.75,
        waiting=0.25,
    )


def test_what_there_is_none_of():
    assert throughput(STEPS[2:3]).loss is None
    assert throughput(STEPS[:1]).ordinary_seconds is None
    assert throughput(STEPS[1:]).refresh_seconds is None
    uncounted = [StepPoint(1, 3.0, 0.1, 5.0, 5.0, False)]
    assert throughput(uncounted).terms_per_second is None
    assert History(uncounted).median_terms_per_second() is None


def test_a_record_as_a_whole():
    record = History(STEPS)
    assert record.median_terms_per_second() == pytest.approx(5.0)  # of 10, 5 and 2.5: refreshes are left out
    assert record.waiting_share() == pytest.approx(0.25)
    assert History().waiting_share() == 0


def test_the_best_is_the_first_of_the_most_accurate():
    evaluations = [
        accuracy_point(2, 0, 1.0, top1, 1.0, 0.5, averaged, 1.0) for top1, averaged in ((0.9, 0.1), (0.2, 0.7))
    ]
    assert History([], evaluations).best is evaluations[1]  # the averaged weights are what would be used
    plain = [accuracy_point(step, 0, 1.0, top1, 1.0) for step, top1 in ((2, 0.5), (4, 0.8), (6, 0.8), (8, 0.7))]
    assert History([], plain).best is plain[1]
    assert History().best is None


@pytest.mark.parametrize("step", range(6))
def test_before_and_after_make_the_whole(step):
    refreshes = [RefreshPoint(s, layer, "update", None, 1.0) for s in (1, 3) for layer in "ab"]
    record = History(STEPS, [accuracy_point(s, 0, 1.0, 0.5, 1.0) for s in (2, 4)], refreshes)
    before, after = record.up_to(step), record.since(step)
    assert before.steps + after.steps == record.steps
    assert before.evaluations + after.evaluations == record.evaluations
    assert before.refreshes + after.refreshes == record.refreshes
    assert all(point.step > step for point in after.points())
