"""A step that fails changes nothing; models that change between two steps."""

import copy
import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from tiny import assert_same, backward, batches, train, weights
from torch_thor import THOR, ThorMuon
from torch_thor.curvature import refresh

STREAM = batches(8, dtype=torch.float32)
MODES = {
    "plain": partial(THOR, trace_thresholds=(0.0, 0.0)),
    "nesterov": partial(THOR, trace_thresholds=(0.0, 0.0), nesterov=True),
    "orthogonal": ThorMuon,
}


def pair(mode, steps, **options):
    """Two alike, after so many steps: one meets the fault."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Sequential(
            *(nn.LayerNorm(5), nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh()),
            *(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        )
        optimizer = MODES[mode](
            model, **{"update_interval": 3, "weight_decay": 0.1, "split_dim": 4, **options}
        )
        train(model, optimizer, STREAM[:steps])
        made.append((model, optimizer))
    return made


def go_on_alike(one, other, stream, where="it"):
    for model, optimizer in (one, other):
        train(model, optimizer, stream)
    assert_same(weights(one[0]), weights(other[0]), where)
    assert_same(one[1].state_dict(), other[1].state_dict(), where)


class Bug(Exception):
    pass


def bug(*_, **__):
    raise Bug("the user's own")


OWN = Bug, "the user's own"
SPLIT = RuntimeError, r"split_dim=2: A of layer '1' has shape \(5, 4\) .*put it back"
SHAPE = RuntimeError, r"'4(\.weight)?' has shape .* and needs .*weight .* was changed"


# what is replaced between backward pass and step, the error, and after how many steps (a refresh is
# due in steps 0 and 3)
FAULTS = {
    "loss_terms": (lambda o, patch: patch.setattr(o, "loss_terms", bug), OWN, (0, 3)),
    "update_interval": (  # between refreshes nobody asks it
        lambda o, patch: patch.setitem(o.param_groups[0], "update_interval", bug), OWN, (0, 3)
    ),
    "memory": (lambda _, patch: patch.setattr(refresh, "invert_", bug), OWN, (0, 3)),
    "split_dim": (
        lambda o, patch: patch.setitem(o.param_groups[0], "split_dim", 2), SPLIT, (1, 3)
    ),
    "shape": (
        lambda o, patch: patch.setattr(o.model[4].weight, "data", torch.randn(7, 6)), SHAPE, (1, 3)
    ),
    "hook before the step": (
        lambda o, patch: patch.setitem(o._optimizer_step_pre_hooks, 0, bug), OWN, (0, 1, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails_changes_nothing(fault, monkeypatch):
    """Weights, state, which layers are due. When it is mended, training goes on as without it."""
    make, (error, message), when = FAULTS[fault]
    for mode, steps in itertools.product(MODES, when):
        (model, optimizer), (twin, other) = pair(mode, steps)
        backward(model, STREAM[steps])
        before = weights(model), copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patch:
            make(optimizer, patch)
            with pytest.raises(error, match=message):
                optimizer.step()
        where = f"{mode}, step {steps}"
        assert_same(weights(model), before[0], where)
        if steps:  # the first step begins with a state of zeros
            assert_same(optimizer.state_dict(), before[1], where)
        assert all(layer.due == (steps != 1) for layer in optimizer.curvature.values()), where
        optimizer.zero_grad()
        go_on_alike((model, optimizer), (twin, other), STREAM[steps:], where)


def test_warnings_that_are_errors_come_when_the_step_is_over():
    (model, optimizer), (twin, other) = pair("plain", 3)
    for one, its in ((model, optimizer), (twin, other)):
        backward(one, STREAM[3])
        its.curvature["1"].statistics.sums()[0].rows.neg_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="layer '1': a block was not positive definite"):
            optimizer.step()
    with pytest.warns(RuntimeWarning, match="layer '1'") as caught:
        other.step()
    assert caught[0].filename == __file__
    go_on_alike((model, optimizer), (twin, other), STREAM[4:])


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_converted_takes_its_state_along(mode):
    """From float32 to float64: as with a float64 state of the same numbers. Half keeps float32."""
    for steps, momentum in ((1, 0.9), (3, 0.9), (2, 0.0)):
        (model, optimizer), (twin, other) = pair(mode, steps, momentum=momentum)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            for key, value in state.items():
                if torch.is_tensor(value) and key != "step":
                    state[key] = value.double()
        model.double()
        twin.double()
        other.load_state_dict(saved)
        stream = [(x.double(), labels) for x, labels in STREAM[steps:]]
        go_on_alike((model, optimizer), (twin, other), stream)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model.to(dtype)
        train(model, optimizer, [(x.to(dtype), labels) for x, labels in STREAM])
        entries = [v for state in optimizer.state.values() for v in state.values()]
        assert {v.dtype for v in entries if torch.is_tensor(v)} == {torch.float32}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 3))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


REPLACEMENTS = {
    "module": lambda model: setattr(model.head, "0", nn.Linear(6, 3)),
    "weight": lambda model: setattr(model.head[0], "weight", nn.Parameter(torch.randn(3, 6))),
}


@pytest.mark.parametrize("make", [THOR, ThorMuon])
@pytest.mark.parametrize("what", REPLACEMENTS)
def test_what_was_replaced_is_listed_as_not_trained_and_can_be_given(what, make):
    """Before or after it was told of; then it is preconditioned from its first step on."""
    for steps, told in itertools.product((0, 3), (False, True)):
        model = Net()
        optimizer = make(model, update_interval=3)
        train(model, optimizer, STREAM[:steps])
        REPLACEMENTS[what](model)
        given = {p for group in optimizer.param_groups for p in group["params"]}
        new = {name: p for name, p in model.named_parameters() if p not in given}
        if told:
            listed = {entry.name: entry.reason for entry in optimizer.coverage()}
            assert "not trained" in listed["head.0.weight"]
            still = {name: p.detach().clone() for name, p in new.items()}
            train(model, optimizer, STREAM * 2)
            assert set(optimizer.curvature) == {"body"}
            assert all(torch.equal(new[name], value) for name, value in still.items())
            assert optimizer.curvature["body"].refreshes >= 1
        optimizer.add_param_group({"params": [*new.values()]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, STREAM[:3])
        assert optimizer.curvature["head.0"].refreshes >= 1
        before = weights(model)
        train(model, optimizer, STREAM)
        assert not torch.equal(before["head.0.weight"], model.head[0].weight)


def test_replacing_the_only_layer_is_the_documented_error():
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = THOR(model)
    model[0] = nn.Linear(5, 3)
    backward(model, STREAM[0])
    for call in (optimizer.step, optimizer.coverage):
        with pytest.raises(RuntimeError, match=r"'0.weight' is in none of .* groups.*Make it"):
            call()
