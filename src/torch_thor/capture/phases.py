"""The phases of a layer, which say what its calls are used for.

Only :class:`torch_thor.capture.capture.Capture` changes them. They are derived from entries of the layer's state
(``due``, ``idle``, ``uncalled``), which checkpoints contain.
"""

import enum


class Phase(enum.Enum):
    """What the calls of one layer are used for until the next step.

    OFF: they are not used, and there is no hook for them. COUNTING: the number of loss terms is derived from its
    inputs, and no statistics are gathered. OPTIONAL: statistics are gathered if the layer is called, but they are not
    required: the loss has not reached the layer, its weight is frozen, or its weight is used without calling its
    module. REQUIRED: statistics are gathered, compiled models run eagerly for that purpose, and a refresh on which the
    layer has a gradient but no statistics is an error or causes a warning.
    """

    OFF = enum.auto()
    COUNTING = enum.auto()
    OPTIONAL = enum.auto()
    REQUIRED = enum.auto()


GATHERING = (Phase.OPTIONAL, Phase.REQUIRED)  # the phases in which statistics are gathered
