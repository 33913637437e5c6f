"""The phases of a layer, which say what its calls are used for.

Only :class:`torch_thor.capture.capture.Capture` changes them. They are derived from entries of the layer's state
(``due``, ``idle``, ``uncalled``), which checkpoints contain.
"""

import enum


class Phase(enum.Enum):
    """What the calls of one layer are used for until the next step."""

    OFF = enum.auto()
    COUNTING = enum.auto()
    OPTIONAL = enum.auto()
    REQUIRED = enum.auto()


GATHERING = (Phase.OPTIONAL, Phase.REQUIRED)  # the phases in which statistics are gathered
