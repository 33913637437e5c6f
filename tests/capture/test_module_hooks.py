"""The hooks on modules: what each hands over, who hears it, and that nothing is left.

What they do to compiled code is in tests/optim/test_compile.py.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode

from hooked import hooked
from torch_thor.capture.hooks import ModuleCalls

X = torch.ones(2, 3)


class Watcher:
    """Listens to a model, and notes what it is told of."""

    def __init__(self, model, gathers=True):
        layers, hooks = hooked(model)
        self.gathering = set(layers.values() if gathers else ())
        self.seen = []
        self.calls = ModuleCalls(self)
        self.calls.listen(hooks)

    def watch(self, layer, kind, x, output):
        self.seen.append((layer.name, kind.loss_terms(x)))

    @property
    def names(self):
        return [name for name, _ in self.seen]


def hooks():
    """The number of torch's hooks on the calls of all modules."""
    tables = ("hooks", "pre_hooks", "hooks_with_kwargs", "hooks_always_called")
    return sum(len(getattr(torch_module, f"_global_forward_{table}")) for table in tables)


@pytest.fixture
def listening():
    """Returns a function that has a watcher listen to a model; nothing of it may be left."""
    before, made = hooks(), []

    def listen(model, gathers=True):
        made.append(Watcher(model, gathers))
        return made[-1]

    yield listen
    for watcher in made:
        watcher.calls.close()
    assert _get_current_function_mode() is None
    assert hooks() == before


# ---- who hears what ------------------------------------------------------------------------------


def test_a_call_is_heard_by_who_listens_and_nothing_is_put_on_the_module(listening):
    model, other = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)
    before = {name: copy.copy(value) for name, value in vars(model[0]).items()}
    watchers = [listening(model), listening(model)]
    model(other(X))
    assert [watcher.names for watcher in watchers] == [["0"], ["0"]]
    assert vars(model[0]) == before
    watchers[0].calls.listen(())
    watchers[1].calls.listen(hooked(model)[1])  # in the place of before
    model(X)
    assert [watcher.names for watcher in watchers] == [["0"], ["0", "0"]]


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_heard_while_a_model_is_traced(listening):
    model = nn.Linear(3, 3)
    watcher = listening(model)
    torch.jit.trace(model, X, check_trace=False)
    assert not watcher.seen


# ---- what is handed over -------------------------------------------------------------------------


MODULES = {
    nn.MultiheadAttention(4, 2, batch_first=True): (
        lambda m, x: m(x, x, x, need_weights=False)[0],
        ["q_proj", "k_proj", "v_proj", "out_proj"],
    ),
    nn.LSTM(4, 4, batch_first=True): (lambda m, x: m(x)[0], ["weight_ih_l0", "weight_hh_l0"]),
    nn.GRUCell(4, 4): (lambda m, x: m(x[:, 0], x[:, 1]), ["weight_ih", "weight_hh"]),
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_layers_inside_a_module(module, listening):
    """Seen where rows are wanted; elsewhere the module's own code runs and no more."""
    call, inside = MODULES[module]
    model, x = nn.ModuleDict({"m": module}), torch.randn(3, 5, 4)
    before = call(model["m"], x)
    other = listening(model, gathers=False)
    assert torch.equal(call(model["m"], x), before)
    watcher = listening(model)
    with torch.no_grad():
        call(model["m"], x)
    assert not watcher.seen
    torch.testing.assert_close(call(model["m"], x), before, rtol=1e-5, atol=1e-6)
    assert watcher.names == [f"m.{one}" for one in inside]
    assert {terms for _, terms in watcher.seen} == {3}
    assert not other.seen


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x):
        if isinstance(x, BaseException):
            raise x
        return x @ self.up[1].T


def test_experts_inside_a_transform_are_left_alone(listening):
    """The tensors of a transform have no memory that tells which expert they are."""
    model, x = nn.Sequential(Experts()), torch.randn(2, 5, 4)
    watcher = listening(model)
    transformed = torch.func.vmap(model)(x)
    assert watcher.names == []
    torch.testing.assert_close(transformed, model(x))
    assert watcher.names == ["0.up"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_an_error_inside_forward_leaves_open_is_closed_by_the_next_call(listening, error):
    """torch calls no hook for what is no Exception."""
    model = nn.Sequential(Experts())
    watcher = listening(model)
    with pytest.raises(error):
        model(error())
    assert (_get_current_function_mode() is None) == issubclass(error, Exception)
    model(torch.randn(5, 4))
    assert watcher.names == ["0.up"]
    assert _get_current_function_mode() is None
