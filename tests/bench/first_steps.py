"""The first steps of a training, to compare with those that were recorded."""

import pytest

from torch_thor.bench import describe
from torch_thor.training import Callback, train

SAME = ("processor", "python", "torch")  # what the bits of a run depend on


class StopAt(Callback):
    """Ends a training before its schedule does."""

    class Reached(Exception):
        """The step is done."""

    def __init__(self, step):
        self.step = step

    def at_boundary(self, run):
        if run.step == self.step:
            raise self.Reached


def take(run, number):
    """Train `number` steps, and return their losses as raw data have them."""
    with pytest.raises(StopAt.Reached):
        train(run, [StopAt(number)])
    return [round(point.loss, 5) for point in run.record.steps]


def same_machine(recorded):
    """Tell whether every bit of a recorded run must come out again."""
    return all(describe()[key] == recorded["machine"][key] for key in SAME)


def assert_recorded(losses, recorded):
    """Compare first losses with those of raw data: every bit, or nearly so on another machine."""
    if same_machine(recorded):
        assert losses == recorded["loss"][: len(losses)]
    else:
        assert losses[:10] == pytest.approx(recorded["loss"][: min(10, len(losses))], rel=1e-3)
