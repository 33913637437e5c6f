"""The phases of gathering: which there are, what leads from one to the next, and what a layer's calls do in each."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from hooked import hooked
from tiny import listened_to
from torch_thor.capture.capture import Capture
from torch_thor.capture.module_calls import module_calls
from torch_thor.capture.phases import GATHERING, Phase
from torch_thor.curvature import Decision, RefreshEvent
from torch_thor.curvature.layer_state import make_layer_state

SIDES = ("A", "G")
OFF, COUNTING, OPTIONAL, REQUIRED = Phase
NAMES = ("0", "2", "4")


class Net:
    """A network of three linear layers, their curvature, and who gathers it."""

    def __init__(self, *, sides=SIDES, sampled=False):
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
        states = defaultdict(dict)
        self.layers, hooks = hooked(self.model, sides=sides)
        for layer in self.layers.values():
            layer.weight_view.bind(states[layer.weight], {})
            make_layer_state(layer)
        self.capture = Capture(hooks, sampled=sampled)
        self.capture.resume()

    def __getitem__(self, name):
        return self.layers[name]

    def phases(self):
        return [self.capture.phase(self.layers[name]) for name in NAMES]

    def release(self, *names):
        for name in names:
            self.capture.release(self[name])
        self.capture.listen()

    def want(self, *names):
        self.capture.want([self[name] for name in names])
        self.capture.listen()

    def forward(self, size=4):
        return self.model(torch.randn(size, 5))

    def backward(self, size=4):
        self.forward(size).square().sum().backward()

    def rows(self):
        return [self[name].statistics.rows for name in NAMES]

    def finish(self, decisions, silent=()):
        """A refresh of all layers that gather, with these decisions."""
        refreshing = [layer for layer in self.layers.values() if self.capture.gathers(layer)]
        absence = self.capture.absence(refreshing, [self[name] for name in silent])
        events = [RefreshEvent(name, 0, decision, None, 1.0) for name, decision in decisions.items()]
        self.capture.finish_refresh(refreshing, events, absence)
        self.capture.listen()


@pytest.fixture
def net():
    return Net()


# ---- the phases themselves -------------------------------------------------------------------------------------------


def test_which_gather(net):
    assert GATHERING == (OPTIONAL, REQUIRED)
    net.release("2")
    assert [net.capture.gathers(net[name]) for name in NAMES] == [True, False, True]


# ---- transitions -----------------------------------------------------------------------------------------------------


def froze(net):
    net["2"].weight.requires_grad_(False)


def stopped(net):
    net.release("2")
    net["2"].record(stopped=True)
    net.want("2")


def taken(net):
    net.backward()
    net.finish({"0": Decision.UPDATE, "2": Decision.KEEP, "4": Decision.STOP})


def failed(net):
    """None of them has ever had factors."""
    net.backward()
    net.finish(dict.fromkeys(NAMES, Decision.FAILED))


def failed_later(net):
    net.backward()
    net["2"].state["refreshes"] = 1
    net.finish({"0": Decision.FAILED, "2": Decision.FAILED, "4": Decision.UPDATE})


def without_an_event(net):
    net.backward()
    net.finish({"0": Decision.UPDATE, "4": Decision.UPDATE})


def unreached(net):
    """No loss has come to the last two layers."""
    net.model[0](torch.randn(4, 5)).sum().backward()
    net.finish({"0": Decision.UPDATE})


def unreached_and_then_wanted(net):
    unreached(net)
    net.want(*NAMES)


def not_called(net):
    """The weight of the last layer is used, and the layer is not called."""
    (net.model[:4](torch.randn(4, 5)) @ net.model[4].weight.T).sum().backward()
    net.finish({"0": Decision.UPDATE, "2": Decision.UPDATE}, silent=["4"])


def not_called_and_then_wanted(net):
    not_called(net)
    net.want(*NAMES)


def reached_after_all(net):
    unreached_and_then_wanted(net)
    net.model.zero_grad()
    net.backward()
    net.capture.finish_step()
    net.capture.listen()


def loaded(net):
    for name in ("0", "4"):
        net[name].record(due=False)
    net.capture.resume()


def followed_by_fewer(net):
    hooks = [hook for hook in net.capture._hooks if hook.layers[0] is not net["2"]]
    net.capture.follow(hooks)


TRANSITIONS = [
    (lambda net: None, [REQUIRED, REQUIRED, REQUIRED]),
    (lambda net: net.release(*NAMES), [OFF, OFF, OFF]),
    (lambda net: net.release("2"), [REQUIRED, COUNTING, REQUIRED]),
    (lambda net: (net.release(*NAMES), net.want("4")), [COUNTING, COUNTING, REQUIRED]),
    (lambda net: (net.release(*NAMES), net.want(*NAMES)), [REQUIRED, REQUIRED, REQUIRED]),
    (froze, [REQUIRED, REQUIRED, REQUIRED]),  # until phases are looked at again
    (lambda net: (froze(net), net.capture.listen()), [REQUIRED, OPTIONAL, REQUIRED]),
    (stopped, [REQUIRED, COUNTING, REQUIRED]),
    (taken, [OFF, OFF, OFF]),
    (failed, [REQUIRED, REQUIRED, REQUIRED]),
    (failed_later, [REQUIRED, OFF, OFF]),
    (without_an_event, [COUNTING, REQUIRED, OFF]),
    (unreached, [OFF, OPTIONAL, OPTIONAL]),
    (unreached_and_then_wanted, [REQUIRED, OPTIONAL, OPTIONAL]),
    (reached_after_all, [REQUIRED, REQUIRED, REQUIRED]),
    (not_called, [OFF, OFF, OFF]),
    (not_called_and_then_wanted, [REQUIRED, REQUIRED, OPTIONAL]),
    (loaded, [COUNTING, REQUIRED, COUNTING]),
    (followed_by_fewer, [REQUIRED, OFF, REQUIRED]),
]


@pytest.mark.parametrize(("event", "phases"), TRANSITIONS)
def test_transitions(net, event, phases):
    event(net)
    # once the first layer is known it alone counts
    known_first = net.capture.backward.first is net["0"]
    expected = [OFF if known_first and phase is COUNTING and i else phase for i, phase in enumerate(phases)]
    assert net.phases() == expected
    required = REQUIRED in phases
    assert net.capture.watching == required
    if event is not followed_by_fewer:
        heard = {name for name, phase in zip(NAMES, expected, strict=True) if phase is not OFF}
        heard -= {name for name in heard if not net[name].weight.requires_grad and event is not froze}
        assert listened_to(net.model) == (heard if required else set())
        assert (id(net.capture) in module_calls.subscribers) == required
        due = [phase in GATHERING for phase in phases]
        assert [net[name].due for name in NAMES] == due


def test_what_is_wanted_is_looked_up_now(net):
    """A layer that is frozen after the phases were set has nothing to come."""
    assert net.capture.wanting
    for layer in net.layers.values():
        layer.weight.requires_grad_(False)
    assert not net.capture.wanting
    assert net.capture.watching


def test_what_must_survive_is_in_the_state_under_its_keys(net):
    unreached(net)
    found = {name: {key: net[name].state[key] for key in ("due", "idle", "uncalled")} for name in NAMES}
    idle = {"due": 1, "idle": 1, "uncalled": 0}
    assert found == {"0": {"due": 0, "idle": 0, "uncalled": 0}, "2": idle, "4": idle}


def test_a_layer_that_is_followed_again_keeps_its_phase(net):
    net.release("2")
    net.capture.follow(net.capture._hooks)
    assert net.phases() == [REQUIRED, COUNTING, REQUIRED]


def test_a_layer_of_somebody_else_is_off(net):
    assert net.capture.phase(Net()["0"]) is OFF


# ---- what calls do in each phase -------------------------------------------------------------------------------------


def test_calls_of_a_layer_that_counts_give_loss_terms_and_no_rows(net):
    net.release("0")
    net.backward(size=4)
    assert net.rows() == [0, 4, 4]
    assert net.capture.backward.loss_terms == 4
    assert net.capture.reached == {net["2"], net["4"]}


def test_only_the_first_counts_once_it_is_known(net):
    net.backward()
    net.capture.discard()
    net.release("0", "2")
    assert net.phases() == [COUNTING, OFF, REQUIRED]


@pytest.mark.parametrize("options", [{"sides": SIDES[:1]}, {"sampled": True}])
def test_nobody_counts_where_loss_terms_come_from_elsewhere(options):
    net = Net(**options)
    net.release("0")
    assert net.phases() == [OFF, REQUIRED, REQUIRED]


def test_optional_statistics_are_gathered_where_others_are_required(net):
    unreached_and_then_wanted(net)
    net.backward()
    assert net.rows() == [4, 4, 4]


def test_between_refreshes_no_hook_is_left(net):
    """None on a gradient, none on a module, and nothing that keeps compiled code from running."""
    net.release(*NAMES)
    assert id(net.capture) not in module_calls.subscribers
    assert module_calls.subscribers or not module_calls._handles
    outputs = []
    x = torch.randn(4, 5)
    for module in net.model:
        x = module(x)
        outputs.append(x)
    assert [output._backward_hooks for output in outputs] == [None] * 5


def test_a_gradient_that_comes_when_the_layer_is_off_is_not_gathered(net):
    loss = net.forward().square().sum()
    net.release(*NAMES)
    loss.backward()
    assert net.rows() == [0, 0, 0]
    assert not net.capture.reached


def test_evaluation_passes_leave_nothing(net):
    with torch.no_grad():
        net.forward()
    net.forward()  # never differentiated
    assert net.rows() == [0, 0, 0]
    assert net.capture.backward.loss_terms == 0


def test_discard_forgets_a_step_and_no_phase(net):
    net.backward()
    assert net.rows() == [4, 4, 4]
    assert net.capture.reached == set(net.layers.values())
    net.capture.discard()
    assert net.rows() == [0, 0, 0]
    assert not net.capture.reached
    assert net.capture.backward.loss_terms == 0
    assert net.phases() == [REQUIRED] * 3


# ---- inputs that wait for their backward pass ------------------------------------------------------------------------

# and the number of forward passes whose rows count in the end
INPUTS = {
    "+": 0, "+b": 1, "+zb": 1, "+zzb": 1, "+b+b": 2, "++b": 2, "+b+zb": 1, "+z+b": 1, "+b+": 1, "+bz": 0, "+b+z": 0,
    "+zbz": 0, "+fb": 1, "+bf": 0, "+bf+b": 1, "+bn": 1, "+bn+b": 1, "+nb": 1,
}  # fmt: skip


@pytest.mark.parametrize("sides", [SIDES, SIDES[:1]], ids=["A and G", "A"])
@pytest.mark.parametrize("events", INPUTS)
def test_inputs(events, sides):
    """``+`` a forward pass, ``b`` the backward pass of the latest, ``z`` ``optimizer.zero_grad()``, ``n``
    ``model.zero_grad()``, ``f`` the step is over.
    """
    net, output = Net(sides=sides), None
    for event in events:
        if event == "+":
            output = net.forward()
        elif event == "b":
            output.square().sum().backward()
        elif event == "f":
            net.capture.discard()
        else:
            if event == "z":
                net.capture.discard_with_gradients()
            net.model.zero_grad()
    never_differentiated = sides == SIDES and events == "++b"  # those count with the next pass where A comes alone
    assert net.rows() == [4 * (INPUTS[events] - never_differentiated)] * 3
