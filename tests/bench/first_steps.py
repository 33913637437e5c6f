"""The first steps of a training, to compare with those that were recorded."""

import pytest

from torch_thor.training import Observer, Record, train

NUMBER = 3  # the third loss has seen two steps, and differs between processors by less than 1e-4


class StopAt(Observer):
    """Ends a training before its schedule does."""

    class Reached(Exception):
        """The step is done."""

    def __init__(self, step):
        self.number = step

    def end_of_step(self, run):
        if run.step == self.number:
            raise self.Reached


def take(run, number=NUMBER):
    """Train `number` steps, and return their measurements."""
    record = Record()
    with pytest.raises(StopAt.Reached):
        train(run, [record, StopAt(number)])
    return record.points


def assert_recorded(run, recorded):
    """The first losses are those of raw data: the same weights, batches and steps, on any processor."""
    assert [round(point.loss, 5) for point in take(run)] == pytest.approx(recorded["loss"][:NUMBER], rel=1e-3)
