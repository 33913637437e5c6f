"""The life of a layer: when it takes part in a refresh, as pure functions of four facts.

A layer begins due. It is due again when the interval of its group ends, unless the trace rule has
stopped it. A layer that is due gathers statistics if it is called; a step waits for it (runs
eagerly, and agrees with other processes) unless it is idle or uncalled. A loss that reaches an idle
layer wakes it, and from then on steps wait until a pass reaches it again: layers may be used, or
frozen, in turn.
"""

import enum
from dataclasses import dataclass, replace
from functools import cache


class Decision(enum.Enum):
    """The result of a refresh for one layer: a case of the trace rule, or a failure.

    The trace rule is from Chen et al. 2021, section 3.2.

    UPDATE: new factors were taken and inverted. KEEP: the new statistics were dropped. STOP: the
    new statistics were dropped, and the layer never refreshes again. FAILED: the new factors could
    not be inverted; the last good inverse stays in use.
    """

    UPDATE = "update"
    KEEP = "keep"
    STOP = "stop"
    FAILED = "failed"


IDLE, WOKEN = 1, 2  # what is stored as ``idle``, beside 0


@dataclass(frozen=True)
class Life:
    """Whether a layer takes part in refreshes."""

    due: bool = True  # the next step with statistics applies the trace rule to it
    # IDLE: the loss did not reach it when it was due, and has not since. WOKEN: the loss has
    # reached it once since then, in a step that did not watch it. Otherwise 0
    idle: int = 0
    uncalled: bool = False  # its weight is used without calling its module
    stopped: bool = False  # by the trace rule: it takes no new factors any more


@cache
def after_refresh(
    life: Life,
    *,
    decision: Decision | None,
    reached: bool,
    without_statistics: bool,
    has_gradient: bool,
    has_factors: bool,
) -> Life:
    """Return the life of a layer that was due, after a refresh.

    Args:
        life: its life before.
        decision: what the refresh has decided; None if it had no rows.
        reached: whether the loss reached it.
        without_statistics: whether it had a gradient and no statistics.
        has_gradient: whether its weight has a gradient.
        has_factors: whether it has factors in use now.
    """
    uncalled = without_statistics or (life.uncalled and not reached)
    waits = decision is None or (decision is Decision.FAILED and not has_factors)
    return Life(
        due=waits and not uncalled,
        idle=0 if reached or has_gradient else life.idle or IDLE,
        uncalled=uncalled,
        stopped=life.stopped or decision is Decision.STOP,
    )


@cache
def after_step(life: Life, *, has_gradient: bool) -> Life:
    """Return the life of a layer that gathers, after a step without a refresh."""
    return replace(life, idle=WOKEN) if has_gradient and life.idle else life


@cache
def when_interval_ends(life: Life) -> Life:
    """Return the life of a layer when its group's next refresh has come."""
    return replace(life, due=not life.stopped)
