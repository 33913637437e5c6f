"""The phases of gathering: what each layer's calls are used for.

They belong to :class:`torch_thor.capture.capture.Capture`, which alone changes them. What must outlive the process is
in the layer's state (``due``, ``idle``, ``uncalled``); the phases are derived from it.
"""

import enum


class Phase(enum.Enum):
    """What the calls of one layer are used for until the next step.

    OFF: for nothing; no hook is there for them. COUNTING: its inputs tell the number of loss terms, and no statistics
    are gathered. OPTIONAL: statistics are gathered if they come, and are not waited for: no loss has reached the layer,
    its weight is frozen, or its weight is used without calling it. REQUIRED: statistics are gathered; the passes of the
    step are run so that they come (without ``torch.compile``), and a step in which the layer has a gradient and none
    has come is an error or is reported.
    """

    OFF = enum.auto()
    COUNTING = enum.auto()
    OPTIONAL = enum.auto()
    REQUIRED = enum.auto()


GATHERING = (Phase.OPTIONAL, Phase.REQUIRED)  # the phases in which statistics are gathered
