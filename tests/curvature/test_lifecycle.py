"""When a layer takes part in a refresh: the pure functions that decide it, fact by fact.

What leads to which layers gathering is in tests/capture/test_capture.py.
"""

import pytest

from torch_thor.curvature import Decision
from torch_thor.curvature.lifecycle import (
    IDLE,
    WOKEN,
    Life,
    after_refresh,
    after_step,
    when_interval_ends,
)

USUAL = {"reached": True, "without_statistics": False, "has_gradient": True, "has_factors": True}
UNREACHED = {"decision": None, "reached": False, "has_gradient": False}
STOPPED = Life(due=False, stopped=True)


def refreshed(life, decision=Decision.UPDATE, **facts):
    return after_refresh(life, decision=decision, **{**USUAL, **facts})


@pytest.mark.parametrize(
    ("found", "life"),
    [
        (refreshed(Life(), Decision.KEEP), Life(due=False)),
        (refreshed(Life(), Decision.STOP), STOPPED),
        (refreshed(STOPPED), STOPPED),
        (when_interval_ends(STOPPED), STOPPED),
        (when_interval_ends(Life(due=False)), Life()),
        # what could not be decided stays due
        (refreshed(Life(), None), Life()),
        (refreshed(Life(), Decision.FAILED, has_factors=False), Life()),
        (refreshed(Life(), Decision.FAILED), Life(due=False)),
        # idle until a step that does not watch it has a gradient, woken until it is reached
        (refreshed(Life(), **UNREACHED), Life(idle=IDLE)),
        (after_step(Life(idle=IDLE), has_gradient=False), Life(idle=IDLE)),
        (after_step(Life(idle=IDLE), has_gradient=True), Life(idle=WOKEN)),
        (after_step(Life(), has_gradient=True), Life()),
        (when_interval_ends(Life(idle=WOKEN)), Life(idle=WOKEN)),
        (refreshed(Life(idle=WOKEN), **UNREACHED), Life(idle=WOKEN)),
        (refreshed(Life(idle=WOKEN)), Life(due=False)),
        (refreshed(Life(), **{**UNREACHED, "has_gradient": True}), Life()),
    ],
)
def test_a_fact_leads_to_a_life(found, life):
    assert found == life
