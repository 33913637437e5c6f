"""The calls of modules are heard while somebody listens; meanwhile compiled code stands aside."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.nn.modules import module as torch_module

from tiny import leave_no_listeners
from torch_thor.capture.module_calls import ModuleCalls


class Hearer:
    """Who listens; weakly held."""


class Recorder:
    """Notes what it hears of one module."""

    def __init__(self, module):
        self.module, self.notes = module, []

    def enter(self, hearer, args):
        self.notes.append(("enter", hearer, args))

    def leave(self, hearer, args, kwargs, output):
        self.notes.append(("leave", hearer, args, kwargs, output))

    def abandon(self):
        self.notes.append(("abandon",))

    @property
    def events(self):
        return [note[0] for note in self.notes]


class Double(nn.Module):
    def forward(self, x, scale=2):
        if x is None:
            raise ValueError("no input")
        return scale * x


def hooks():
    """What torch has of hooks on the calls of all modules."""
    tables = (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks_with_kwargs,
        torch_module._global_forward_hooks_always_called,
    )
    return sum(len(table) for table in tables)


def stance():
    return eval_frame._stance.stance


@pytest.fixture
def calls():
    """A registry of its own; nothing of it may be left."""
    leave_no_listeners()
    before = hooks()
    assert stance() == "default"
    made = ModuleCalls()
    yield made
    for reference, _ in list(made.subscribers.values()):
        made.listen(reference(), ())
    assert hooks() == before
    torch.compiler.set_stance("default")


def heard(calls, module=None):
    """A module, who listens to it, and what it hears."""
    module, hearer = module or Double(), Hearer()
    recorder = Recorder(module)
    calls.listen(hearer, [recorder])
    return module, hearer, recorder


X = torch.ones(2)


# ---- who hears what --------------------------------------------------------------------------------------------------


def test_a_call_is_heard_from_both_ends_and_nothing_is_put_on_the_module(calls):
    module, other = Double(), Double()
    before = {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    _, hearer, recorder = heard(calls, module)
    other(X)
    assert not recorder.notes
    y = module(X, scale=3)
    assert recorder.notes[0][:2] == ("enter", hearer)
    assert recorder.notes[1][:2] == ("leave", hearer)
    assert recorder.notes[0][2] is recorder.notes[1][2]
    assert recorder.notes[0][2][0] is X
    assert recorder.notes[1][3] == {"scale": 3}
    assert recorder.notes[1][4] is y
    assert vars(module) == before


def test_hooks_are_there_while_somebody_listens(calls):
    before = hooks()
    first, second = Hearer(), Hearer()
    modules = [Double(), Double()]
    recorders = [Recorder(module) for module in modules]
    calls.listen(first, recorders)
    there = hooks()
    assert there > before
    calls.listen(second, recorders[1:])
    assert hooks() == there  # one pair of hooks, whoever listens
    modules[1](X)
    assert [note[1] for note in recorders[1].notes if note[0] == "enter"] == [first, second]
    calls.listen(first, ())
    assert hooks() == there
    calls.listen(second, ())
    assert hooks() == before
    modules[0](X)
    assert not recorders[0].notes


def test_to_listen_again_takes_the_place_of_before(calls):
    recorders, hearer = [Recorder(Double()), Recorder(Double())], Hearer()
    for recorder in recorders:
        calls.listen(hearer, [recorder])
    for recorder in recorders:
        recorder.module(X)
    assert [recorder.events for recorder in recorders] == [[], ["enter", "leave"]]


def test_a_hearer_that_is_dropped_listens_no_more(calls):
    before = hooks()
    module, hearer, _ = heard(calls)
    _, other, recorder = heard(calls, module)
    del hearer
    gc.collect()
    module(X)
    assert recorder.events == ["enter", "leave"]
    assert len(calls.subscribers) == 1
    recorder.notes.clear()
    del other
    gc.collect()
    assert hooks() == before


def test_a_hearer_whose_identity_is_taken_over_is_not_forgotten(calls):
    """What tells of the end of one must not remove another that lies where it lay."""
    module, old, _ = heard(calls)
    reference, modules = calls.subscribers.pop(id(old))
    _, new, recorder = heard(calls, module)
    calls.subscribers[id(old)] = calls.subscribers.pop(id(new))
    taken = id(old)
    del old
    gc.collect()
    module(X)
    assert recorder.events == ["enter", "leave"]
    assert reference() is None
    assert modules
    calls.subscribers[id(new)] = calls.subscribers.pop(taken)


def test_exceptions_are_told(calls):
    module, _hearer, recorder = heard(calls)
    with pytest.raises(ValueError, match="no input"):
        module(None)
    assert recorder.events == ["enter", "abandon"]
    recorder.notes.clear()

    def refuse(*_):
        raise RuntimeError("refused")

    handle = module.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="refused"):
        module(X)
    handle.remove()
    module(X)
    assert recorder.events == ["enter", "abandon", "enter", "leave"]


def test_it_sees_what_forward_returned_before_others_replace_it(calls):
    module = Double()
    everywhere = torch_module.register_module_forward_hook(lambda *_: "replaced")
    try:
        _, _hearer, recorder = heard(calls, module)
        assert module(X) == "replaced"
    finally:
        everywhere.remove()
    torch.testing.assert_close(recorder.notes[1][4], 2 * X)


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_heard_while_a_model_is_traced(calls):
    module, _hearer, recorder = heard(calls)
    torch.jit.trace(module, X, check_trace=False)
    assert not recorder.notes


# ---- compiled code ---------------------------------------------------------------------------------------------------


def test_compiled_code_is_not_used_while_somebody_listens(calls):
    _, first, recorder = heard(calls)
    assert stance() == "force_eager"
    calls.listen(first, [recorder])
    _, second, _ = heard(calls)
    calls.listen(first, ())
    assert stance() == "force_eager"
    _, dropped, _ = heard(calls)
    del dropped
    gc.collect()
    assert stance() == "force_eager"
    for _ in range(2):
        calls.listen(second, ())
        assert stance() == "default"
    _, dropped, _ = heard(calls)
    del dropped
    gc.collect()
    assert stance() == "default"


def test_the_stance_of_the_user_comes_back(calls):
    torch.compiler.set_stance("eager_on_recompile")
    _, hearer, recorder = heard(calls)
    assert stance() == "force_eager"
    calls.listen(hearer, ())
    assert stance() == "eager_on_recompile"
    calls.listen(hearer, [recorder])
    torch.compiler.set_stance("fail_on_recompile")  # meanwhile
    calls.listen(hearer, ())
    assert stance() == "fail_on_recompile"
    calls.listen(hearer, [recorder])
    torch.compiler.set_stance("default")
    _, other, _ = heard(calls)  # takes the place of what was set meanwhile
    assert stance() == "force_eager"
    calls.listen(hearer, ())
    calls.listen(other, ())
    assert stance() == "default"


def test_a_context_that_was_entered_meanwhile_does_not_bring_ours_back(calls):
    """What it puts back on leaving is our stance, which then means what held before it."""
    _, hearer, _ = heard(calls)
    with torch.compiler.set_stance("eager_on_recompile"):
        calls.listen(hearer, ())
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def test_the_compilers_warning_is_silenced_while_somebody_listens(calls):
    def silenced():
        return any(one[1] is not None and "global hooks" in one[1].pattern for one in warnings.filters)

    with warnings.catch_warnings():
        assert not silenced()
        _, hearer, _ = heard(calls)
        assert silenced()
        calls.listen(hearer, ())
        assert not silenced()
