"""The hooks on modules: what each hands over, what it opens while the module runs, and that it is closed again."""

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode

from hooked import hooked
from torch_thor.capture.module_calls import ModuleCalls


class Watcher:
    """Notes what it is told of."""

    def __init__(self, gathers):
        self.gathers = lambda layer: gathers
        self.seen = []

    def watch(self, layer, kind, x, output):
        self.seen.append((layer.name, kind.loss_terms(x), tuple(x.shape), tuple(output.shape)))

    @property
    def names(self):
        return [name for name, *_ in self.seen]


@pytest.fixture
def listening():
    """Returns a function that has a watcher listen to a model."""
    calls, made = ModuleCalls(), []

    def listen(model, gathers=True):
        made.append(Watcher(gathers))
        calls.listen(made[-1], hooked(model)[1])
        return made[-1]

    yield listen
    for watcher in made:
        calls.listen(watcher, ())
    assert _get_current_function_mode() is None


class Picky(nn.Linear):
    """Runs its parent's forward; is called by the name of its argument."""


def test_a_called_module_hands_over_input_and_output(listening):
    model = nn.ModuleDict({"fc": Picky(3, 4)})
    watcher = listening(model)
    model["fc"](torch.randn(2, 5, 3))
    model["fc"](input=torch.randn(6, 3))
    assert watcher.seen == [("fc", 2, (2, 5, 3), (2, 5, 4)), ("fc", 6, (6, 3), (6, 4))]


def test_modules_that_share_a_weight_are_one_layer(listening):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    watcher = listening(model)
    model(torch.randn(2, 3))
    assert watcher.names == ["0", "0"]


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "out_proj"]
MODULES = {
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda m, x: m(x, x, x, need_weights=False)[0],
        PROJECTIONS,
    ),
    "sequence first": (
        lambda: nn.MultiheadAttention(4, 2),
        lambda m, x: m(*[x.transpose(0, 1)] * 3)[0],
        PROJECTIONS,
    ),
    "lstm": (lambda: nn.LSTM(4, 4, batch_first=True), lambda m, x: m(x)[0], ["weight_ih_l0", "weight_hh_l0"]),
    "cell": (lambda: nn.GRUCell(4, 4), lambda m, x: m(x[:, 0], x[:, 1]), ["weight_ih", "weight_hh"]),
}


@pytest.mark.parametrize("name", MODULES)
def test_layers_inside_a_module(name, listening):
    """Seen where rows are wanted; without gradients, or where no rows are, the module's own code runs and no more."""
    make, call, inside = MODULES[name]
    model, x = nn.ModuleDict({"m": make()}), torch.randn(3, 5, 4)
    before = call(model["m"], x)
    other = listening(model, gathers=False)
    assert torch.equal(call(model["m"], x), before)
    watcher = listening(model)
    with torch.no_grad():
        call(model["m"], x)
    assert not watcher.seen
    torch.testing.assert_close(call(model["m"], x), before, rtol=1e-5, atol=1e-6)
    assert watcher.names == [f"m.{one}" for one in inside]
    assert {terms for _, terms, *_ in watcher.seen} == {3}
    assert not other.seen


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x):
        if x is None:
            raise ValueError("no input")
        return x @ self.up[1].T


def test_experts_are_told_of_their_products(listening):
    model = nn.Sequential(Experts())
    watchers = [listening(model, gathers) for gathers in (True, False)]
    model(torch.randn(5, 4))
    assert [watcher.names for watcher in watchers] == [["0.up"], []]


def test_an_exception_inside_forward_closes_what_was_opened(listening):
    model = nn.Sequential(Experts())
    watcher = listening(model)
    with pytest.raises(ValueError, match="no input"):
        model(None)
    assert _get_current_function_mode() is None
    model(torch.randn(5, 4))
    assert watcher.names == ["0.up"]


def test_what_an_interrupt_left_open_is_closed_by_the_next_call(listening):
    """torch calls no hook for what is no Exception."""

    class InterruptedExperts(Experts):
        def forward(self, x):
            if x is None:
                raise KeyboardInterrupt
            return super().forward(x)

    model = nn.Sequential(InterruptedExperts())
    watcher = listening(model)
    with pytest.raises(KeyboardInterrupt):
        model(None)
    assert _get_current_function_mode() is not None
    model(torch.randn(5, 4))
    assert watcher.names == ["0.up"]
    assert _get_current_function_mode() is None


def test_one_hook_a_module(listening):
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4))
    _, hooks = hooked(model)
    assert [hook.module for hook in hooks] == list(model)
    assert [len(hook.layers) for hook in hooks] == [1, 4, 2]
