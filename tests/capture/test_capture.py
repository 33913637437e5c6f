"""Which layers gather and are awaited, and which of their rows count."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from hooked import hooked
from tiny import listened_to, listeners, mlp
from torch_thor.capture.gathering import Capture, loss_terms_of_step
from torch_thor.curvature import Decision, RefreshEvent

NAMES = ("0", "2", "4")
UPDATE, FAILED = Decision.UPDATE, Decision.FAILED


class Net:
    """A network of three linear layers, their curvature, and who gathers it."""

    def __init__(self, sides=("A", "G")):
        self.model = mlp(dtype=torch.float32)
        states = defaultdict(dict)
        self.layers, hooks = hooked(self.model, factor_names=sides)
        for layer in self.layers.values():
            layer.bind(layer.laid_out(replace(layer.weight_view, state=states[layer.weight])))
            layer.make_state()
        self.capture = Capture(sampled=False)
        self.capture.follow(hooks)
        self.capture.listen()

    def record(self, *names, **numbers):
        for name in names:
            self.layers[name].record(**numbers)
        self.capture.listen()

    def forward(self, size=4):
        return self.model(torch.randn(size, 5))

    def backward(self, size=4):
        self.forward(size).square().sum().backward()

    def rows(self):
        return [layer.statistics.rows for layer in self.layers.values()]

    def finish(self, decisions):
        """A refresh of all layers that gather, with these decisions."""
        due = [layer for layer in self.layers.values() if layer in self.capture.gathering]
        events = [RefreshEvent(name, 0, decided, None, 1.0) for name, decided in decisions.items()]
        self.capture.finish_refresh(due, events, set())
        self.capture.listen()


# ---- which layers gather, and what is recorded ---------------------------------------------------


def freeze(net):
    net.layers["2"].weight.requires_grad_(False)
    net.capture.listen()


def refreshed(*decisions):
    """All layers have gathered, and are given these decisions; None is no event."""

    def event(net):
        net.backward()
        found = zip(NAMES, decisions, strict=True)
        net.finish({name: decision for name, decision in found if decision})

    return event


def second_refresh(net):
    net.layers["2"].state["refreshes"] = 1


def unreached(net):
    """No loss has come to the last two layers."""
    net.model[0](torch.randn(4, 5)).sum().backward()
    net.finish({"0": UPDATE})


def due_again(net):
    net.record(*NAMES, due=True)


def reached_after_all(net):
    net.model.zero_grad()
    net.backward()
    assert net.capture.finish_step()
    net.capture.listen()


def not_reached_yet(net):
    net.model.zero_grad()
    net.model[0](torch.randn(4, 5)).sum().backward()
    assert not net.capture.finish_step()


def follow_fewer(net):
    others = [hook for hook in net.capture._hooks if hook.layers[0] is not net.layers["2"]]
    net.capture.follow(others)


DECIDED = refreshed(UPDATE, Decision.KEEP, Decision.STOP)
# what happens: the layers that gather, and those of them that are awaited
CASES = {
    (): ("024", "024"),
    (lambda net: net.record("2", due=False),): ("04", "04"),
    (lambda net: net.record(*NAMES, due=False),): ("", ""),
    (freeze,): ("024", "024"),  # until the next refresh, because parts may be frozen in turn
    (freeze, refreshed(UPDATE, None, UPDATE)): ("2", ""),
    (DECIDED,): ("", ""),
    (DECIDED, due_again): ("024", "024"),
    (refreshed(FAILED, FAILED, FAILED),): ("024", "024"),
    (second_refresh, refreshed(FAILED, FAILED, UPDATE)): ("0", "0"),
    (refreshed(UPDATE, None, UPDATE),): ("2", "2"),
    (unreached,): ("24", ""),
    (unreached, due_again): ("024", "0"),
    (unreached, due_again, not_reached_yet): ("024", "0"),
    (unreached, due_again, reached_after_all): ("024", "024"),
    (follow_fewer,): ("04", "04"),
}


def test_what_leads_to_which_layers_gathering():
    """What must survive is in the state; nobody hears if none is awaited."""
    for events, (gathering, awaited) in CASES.items():
        net = Net()
        for event in events:
            event(net)
        case = [event.__name__ for event in events]
        assert {layer.name for layer in net.capture.gathering} == {*gathering}, case
        assert {layer.name for layer in net.capture.awaited} == {*awaited}, case
        assert bool(awaited) == (net.capture._calls in listeners()), case
        if follow_fewer not in events:  # which listens from the next time on
            assert listened_to(net.model) == ({*gathering} if awaited else set()), case
        net.capture._calls.close()
        assert not listened_to(net.model)


# ---- what calls leave ----------------------------------------------------------------------------


def test_only_what_gathers_gives_rows_and_loss_terms():
    net = Net()
    net.record("0", due=False)
    net.backward()
    assert net.rows() == [0, 4, 4]
    assert loss_terms_of_step(net.capture.passes.values())[0] == 4
    assert net.capture.reached == {net.layers["2"], net.layers["4"]}
    loss = net.forward().square().sum()
    net.record(*NAMES, due=False)  # a gradient that comes when nothing gathers any more
    before = net.rows()
    loss.backward()
    assert net.rows() == before


# ``+`` a forward pass, ``e`` an evaluation, ``b`` the backward pass of the latest ``+``, ``z``
# optimizer.zero_grad(), ``f`` the end of the step; and the number of forward passes that count
INPUTS = {
    "+": 0, "e": 0, "+b": 1, "+be": 1, "+zb": 1, "+b+b": 2, "++b": 1, "+b+zb": 1, "+z+b": 1,
    "+b+": 1, "+bz": 0, "+b+z": 0, "+zbz": 0, "+fb": 1, "+bf": 0, "+bf+b": 1,
}  # fmt: skip


@pytest.mark.parametrize("sides", [("A", "G"), ("A",)])
def test_which_passes_count(sides):
    for events, count in INPUTS.items():
        net, output = Net(sides=sides), None
        for event in events:
            if event == "+":
                output = net.forward()
            elif event == "e":
                with torch.no_grad():
                    net.forward()
            elif event == "b":
                output.square().sum().backward()
            else:
                net.capture.discard()
                if event == "z":
                    net.model.zero_grad()
        assert net.rows() == [4 * count] * 3, events
        assert net.capture.awaited == {*net.layers.values()}, events
        if "G" in sides:
            assert loss_terms_of_step(net.capture.passes.values())[0] == net.rows()[0], events
            assert net.capture.reached == ({*net.layers.values()} if count else set()), events
