"""The first steps of a training, to compare with those that were recorded."""

import pytest

from torch_thor.training import Callback, train

NUMBER = 3  # the third loss has seen two steps, and differs between processors by less than 1e-4


class StopAt(Callback):
    """Ends a training before its schedule does."""

    class Reached(Exception):
        """The step is done."""

    def __init__(self, step):
        self.step = step

    def at_boundary(self, run):
        if run.step == self.step:
            raise self.Reached


def take(run, number=NUMBER):
    """Train `number` steps, and return their losses as raw data have them."""
    with pytest.raises(StopAt.Reached):
        train(run, [StopAt(number)])
    return [round(point.loss, 5) for point in run.record.steps]


def assert_recorded(run, recorded):
    """The first losses are those of raw data: the same weights, batches and steps, on any processor."""
    assert take(run) == pytest.approx(recorded["loss"][:NUMBER], rel=1e-3)
