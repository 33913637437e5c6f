"""While somebody waits for statistics, compiled code stands aside, and goes on afterwards as it was told before."""

import gc

import pytest
import torch
from torch._dynamo import eval_frame

from torch_thor.capture.eager import EagerWindow


class Holder:
    """Who wants statistics; weakly held."""


def stance():
    return eval_frame._stance.stance


@pytest.fixture
def window():
    before = stance()
    made = EagerWindow()
    yield made
    made._holders.clear()
    made._settle()
    torch.compiler.set_stance("default")
    assert before == "default"


def test_it_is_open_while_somebody_holds_it(window):
    holder = Holder()
    window.hold(holder, True)
    assert stance() == "force_eager"
    window.hold(holder, True)
    window.hold(holder, False)
    assert stance() == "default"
    window.hold(holder, False)
    assert stance() == "default"


def test_the_last_one_closes_it(window):
    first, second = Holder(), Holder()
    window.hold(first, True)
    window.hold(second, True)
    window.hold(first, False)
    assert stance() == "force_eager"
    window.hold(second, False)
    assert stance() == "default"


def test_a_holder_that_is_dropped_holds_nothing(window):
    first, second = Holder(), Holder()
    window.hold(first, True)
    window.hold(second, True)
    del first
    gc.collect()
    assert stance() == "force_eager"
    del second
    gc.collect()
    assert stance() == "default"


def test_the_stance_before_comes_back(window):
    torch.compiler.set_stance("eager_on_recompile")
    holder = Holder()
    window.hold(holder, True)
    assert stance() == "force_eager"
    window.hold(holder, False)
    assert stance() == "eager_on_recompile"


def test_a_stance_that_was_set_meanwhile_stays(window):
    holder = Holder()
    window.hold(holder, True)
    torch.compiler.set_stance("fail_on_recompile")
    window.hold(holder, False)
    assert stance() == "fail_on_recompile"


def test_it_opens_again_over_a_stance_that_was_set_meanwhile(window):
    holder, other = Holder(), Holder()
    window.hold(holder, True)
    torch.compiler.set_stance("fail_on_recompile")
    window.hold(other, True)
    assert stance() == "force_eager"
    window.hold(holder, False)
    window.hold(other, False)
    assert stance() == "fail_on_recompile"


def test_a_context_that_was_entered_meanwhile_does_not_bring_it_back(window):
    """What it puts back on leaving is our stance, which then means what held before it."""
    holder = Holder()
    window.hold(holder, True)
    with torch.compiler.set_stance("eager_on_recompile"):
        window.hold(holder, False)
        assert stance() == "eager_on_recompile"
    assert stance() == "default"
