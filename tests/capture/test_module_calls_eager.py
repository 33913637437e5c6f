"""While somebody waits for statistics, compiled code stands aside, and goes on afterwards as it was told before."""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

from torch_thor.capture.module_calls import ModuleCalls


class Subscriber:
    """Who wants statistics; weakly held."""


class Handler:
    """Handles the calls of one module; none comes here."""

    def __init__(self):
        self.module = nn.Identity()


def stance():
    return eval_frame._stance.stance


@pytest.fixture
def calls():
    before = stance()
    made = ModuleCalls()
    yield made
    made.subscribers.clear()
    made._close()
    torch.compiler.set_stance("default")
    assert before == "default"


def test_compiled_code_is_not_used_while_there_is_a_subscriber(calls):
    subscriber = Subscriber()
    calls.listen(subscriber, [Handler()])
    assert stance() == "force_eager"
    calls.listen(subscriber, [Handler()])
    calls.listen(subscriber, ())
    assert stance() == "default"
    calls.listen(subscriber, ())
    assert stance() == "default"


def test_it_is_used_again_after_the_last_one(calls):
    first, second = Subscriber(), Subscriber()
    calls.listen(first, [Handler()])
    calls.listen(second, [Handler()])
    calls.listen(first, ())
    assert stance() == "force_eager"
    calls.listen(second, ())
    assert stance() == "default"


def test_a_subscriber_that_is_dropped_counts_no_more(calls):
    first, second = Subscriber(), Subscriber()
    calls.listen(first, [Handler()])
    calls.listen(second, [Handler()])
    del first
    gc.collect()
    assert stance() == "force_eager"
    del second
    gc.collect()
    assert stance() == "default"


def test_the_stance_before_comes_back(calls):
    torch.compiler.set_stance("eager_on_recompile")
    subscriber = Subscriber()
    calls.listen(subscriber, [Handler()])
    assert stance() == "force_eager"
    calls.listen(subscriber, ())
    assert stance() == "eager_on_recompile"


def test_a_stance_that_was_set_meanwhile_stays(calls):
    subscriber = Subscriber()
    calls.listen(subscriber, [Handler()])
    torch.compiler.set_stance("fail_on_recompile")
    calls.listen(subscriber, ())
    assert stance() == "fail_on_recompile"


def test_a_new_subscriber_takes_the_place_of_a_stance_that_was_set_meanwhile(calls):
    subscriber, other = Subscriber(), Subscriber()
    calls.listen(subscriber, [Handler()])
    torch.compiler.set_stance("fail_on_recompile")
    calls.listen(other, [Handler()])
    assert stance() == "force_eager"
    calls.listen(subscriber, ())
    calls.listen(other, ())
    assert stance() == "fail_on_recompile"


def test_a_context_that_was_entered_meanwhile_does_not_bring_ours_back(calls):
    """What it puts back on leaving is our stance, which then means what held before it."""
    subscriber = Subscriber()
    calls.listen(subscriber, [Handler()])
    with torch.compiler.set_stance("eager_on_recompile"):
        calls.listen(subscriber, ())
        assert stance() == "eager_on_recompile"
    assert stance() == "default"
