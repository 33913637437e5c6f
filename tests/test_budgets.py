"""The budgets of CONTRIBUTING.md: a row is lowered in a commit, and raised with a reason."""

import pytest

import ideas
from tiny import leave_no_listeners
from torch_thor import THOR, ThorMuon

# statements, by tests/ideas.py
STATEMENTS = {
    "optim": 2_158,
    "curvature": 1_448,
    "capture": 1_050,
    "distributed": 239,
    "split": 233,
    "training": 2_660,
    "tools": 280,
    "trainers": 61,
}
CORE, WHEEL = 5_128, 8_579
# files and functions of a step on Linear-ReLU-Linear, and classes that the optimizer refers to
ORDINARY, REFRESH, CLASSES = (9, 34), (15, 95), 27


def test_statements():
    found = ideas.statements()
    over = {name: found[name] for name, most in STATEMENTS.items() if found[name] > most}
    assert not over
    assert sum(found[name] for name in ideas.CORE) <= CORE
    assert found.total() <= WHEEL


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
def test_what_a_step_passes(optimizer):
    leave_no_listeners()  # global hooks of other tests' optimizers would be counted
    ordinary, refresh, classes = ideas.steps(optimizer)
    for found, most in ((ordinary, ORDINARY), (refresh, REFRESH)):
        assert found[0] <= most[0]
        assert found[1] <= most[1]
    assert len(classes) <= CLASSES, sorted(found.__qualname__ for found in classes)
