"""The calls of modules are heard while somebody listens, and by nobody afterwards."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from torch_thor.capture.module_calls import _COMPILE_WARNING, ModuleCalls


class Hearer:
    """Who listens; weakly held."""


class Recorder:
    """Notes what it hears of one module."""

    def __init__(self, module, notes=None):
        self.module = module
        self.notes = [] if notes is None else notes

    def enter(self, hearer, args):
        self.notes.append(("enter", hearer, args))

    def leave(self, hearer, args, kwargs, output):
        self.notes.append(("leave", hearer, args, kwargs, output))

    def abandon(self):
        self.notes.append(("abandon",))

    @property
    def events(self):
        return [note[0] for note in self.notes]


def hooks():
    """What torch has of hooks on the calls of all modules."""
    tables = (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks_with_kwargs,
        torch_module._global_forward_hooks_always_called,
    )
    return sum(len(table) for table in tables)


@pytest.fixture
def calls():
    """A registry of its own; nothing of it may be left."""
    before = hooks()
    made = ModuleCalls()
    yield made
    made.subscribers.clear()
    made._close()
    assert hooks() == before


class Double(nn.Module):
    def forward(self, x, scale=2):
        if x is None:
            raise ValueError("no input")
        return scale * x


def test_a_call_is_heard_from_both_ends(calls):
    module, hearer = Double(), Hearer()
    recorder = Recorder(module)
    calls.listen(hearer, [recorder])
    x = torch.ones(2)
    y = module(x, scale=3)
    assert recorder.events == ["enter", "leave"]
    assert recorder.notes[0][1] is recorder.notes[1][1] is hearer
    assert recorder.notes[0][2] == recorder.notes[1][2] == (x,)
    assert recorder.notes[1][3] == {"scale": 3}
    assert recorder.notes[1][4] is y


def test_other_modules_are_not_heard(calls):
    module, other, hearer = Double(), Double(), Hearer()
    recorder = Recorder(module)
    calls.listen(hearer, [recorder])
    other(torch.ones(1))
    assert not recorder.notes


def test_nothing_is_put_on_the_module(calls):
    module, hearer = Double(), Hearer()
    before = {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    calls.listen(hearer, [Recorder(module)])
    module(torch.ones(1))
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
    modules[1](torch.ones(1))
    assert [note[1] for note in recorders[1].notes if note[0] == "enter"] == [first, second]
    calls.listen(first, ())
    assert hooks() == there
    calls.listen(second, ())
    assert hooks() == before
    modules[0](torch.ones(1))
    assert not recorders[0].notes


def test_to_listen_again_takes_the_place_of_before(calls):
    first, second, hearer = Double(), Double(), Hearer()
    recorders = [Recorder(first), Recorder(second)]
    calls.listen(hearer, recorders[:1])
    calls.listen(hearer, recorders[1:])
    first(torch.ones(1))
    second(torch.ones(1))
    assert [recorder.events for recorder in recorders] == [[], ["enter", "leave"]]


def test_a_hearer_that_is_dropped_listens_no_more(calls):
    before = hooks()
    module, hearer, other = Double(), Hearer(), Hearer()
    recorder = Recorder(module)
    calls.listen(hearer, [Recorder(module)])
    calls.listen(other, [recorder])
    del hearer
    gc.collect()
    module(torch.ones(1))
    assert recorder.events == ["enter", "leave"]
    assert len(calls.subscribers) == 1
    recorder.notes.clear()
    del other
    gc.collect()
    assert hooks() == before


def test_a_hearer_whose_identity_is_taken_over_is_not_forgotten(calls):
    """What tells of the end of one must not remove another that lies where it lay."""
    module, old, new = Double(), Hearer(), Hearer()
    recorder = Recorder(module)
    calls.listen(old, [Recorder(module)])
    reference, modules = calls.subscribers.pop(id(old))
    calls.listen(new, [recorder])
    calls.subscribers[id(old)] = calls.subscribers.pop(id(new))
    del old
    gc.collect()
    module(torch.ones(1))
    assert recorder.events == ["enter", "leave"]
    assert reference() is None
    assert modules


def test_an_exception_inside_forward_is_told(calls):
    module, hearer = Double(), Hearer()
    recorder = Recorder(module)
    calls.listen(hearer, [recorder])
    with pytest.raises(ValueError, match="no input"):
        module(None)
    assert recorder.events == ["enter", "abandon"]
    module(torch.ones(1))
    assert recorder.events == ["enter", "abandon", "enter", "leave"]


def test_an_exception_in_a_hook_on_the_module_is_told(calls):
    module, hearer = Double(), Hearer()
    recorder = Recorder(module)

    def refuse(*_):
        raise RuntimeError("refused")

    handle = module.register_forward_pre_hook(refuse)
    calls.listen(hearer, [recorder])
    with pytest.raises(RuntimeError, match="refused"):
        module(torch.ones(1))
    handle.remove()
    assert recorder.events == ["enter", "abandon"]


def test_it_sees_what_forward_returned_before_others_replace_it(calls):
    module, hearer = Double(), Hearer()
    recorder = Recorder(module)
    everywhere = torch_module.register_module_forward_hook(lambda *_: "replaced")
    try:
        calls.listen(hearer, [recorder])
        assert module(torch.ones(1)) == "replaced"
    finally:
        everywhere.remove()
    torch.testing.assert_close(recorder.notes[1][4], 2 * torch.ones(1))


def test_nothing_is_heard_while_a_model_is_traced(calls):
    module, hearer = Double(), Hearer()
    recorder = Recorder(module)
    calls.listen(hearer, [recorder])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, torch.ones(2), check_trace=False)
    assert not recorder.notes


def test_the_compilers_warning_is_silenced_while_somebody_listens(calls):
    def silenced():
        return any(one[1] is not None and one[1].pattern == _COMPILE_WARNING for one in warnings.filters)

    with warnings.catch_warnings():
        hearer = Hearer()
        assert not silenced()
        calls.listen(hearer, [Recorder(Double())])
        assert silenced()
        calls.listen(hearer, ())
        assert not silenced()
