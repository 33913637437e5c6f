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


def assert_recorded(losses, recorded, bits=True):
    """Compare first losses with those of raw data: every bit, or nearly so on another machine.

    Without `bits` nearly so everywhere: THOR's rounding has changed since some data were recorded (tests/golden has the
    bits of today), and a difference in the last bit is one of a thousandth nine steps later.
    """
    if bits and same_machine(recorded):
        assert losses == recorded["loss"][: len(losses)]
    else:
        assert losses[:8] == pytest.approx(recorded["loss"][: min(8, len(losses))], rel=2e-3)
