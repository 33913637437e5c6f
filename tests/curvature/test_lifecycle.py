"""When a layer takes part in a refresh: every case of the pure functions that decide it."""

from itertools import product

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

BOTH = (False, True)
LIVES = [
    Life(due=due, idle=idle, stopped=stopped)
    for due, idle, stopped in product(BOTH, (0, IDLE, WOKEN), BOTH)
]


def refreshed(life=None, decision=Decision.UPDATE, **facts):
    """The life after a refresh of a layer as it is most often, but for these facts."""
    usual = {
        "reached": True,
        "without_statistics": False,
        "has_gradient": True,
        "has_factors": True,
    }
    return after_refresh(life or Life(), decision=decision, **{**usual, **facts})


@pytest.mark.parametrize("decision", [*Decision, None])
def test_only_what_could_not_be_decided_stays_due(decision):
    for has_factors in BOTH:
        life = refreshed(decision=decision, has_factors=has_factors)
        waits = decision is None or (decision is Decision.FAILED and not has_factors)
        assert life == Life(due=waits, stopped=decision is Decision.STOP)


def test_a_stopped_layer_is_never_due_again():
    life = refreshed(decision=Decision.STOP)
    assert when_interval_ends(life) == life == Life(due=False, stopped=True)
    assert when_interval_ends(refreshed()) == Life()


def test_a_layer_that_the_loss_did_not_reach_is_idle_until_it_has_a_gradient():
    life = refreshed(decision=None, reached=False, has_gradient=False)
    assert life == Life(due=True, idle=IDLE)
    assert after_step(life, has_gradient=False) == life
    assert after_step(life, has_gradient=True) == Life(idle=WOKEN)
    assert after_step(Life(), has_gradient=True) == Life()


def test_a_woken_layer_waits_until_it_is_reached():
    """Layers may be used in turn: the step after the one that wakes it does not reach it."""
    unreached = {"decision": None, "reached": False, "has_gradient": False}
    woken = after_step(Life(idle=IDLE), has_gradient=True)
    assert woken == Life(idle=WOKEN)
    assert when_interval_ends(woken) == refreshed(woken, **unreached) == woken
    assert refreshed(woken) == Life(due=False)


def test_nothing_else_changes():
    for life in LIVES:
        assert after_step(life, has_gradient=False) == life
        assert when_interval_ends(life).stopped == life.stopped
        assert refreshed(life) == Life(due=False, stopped=life.stopped)
