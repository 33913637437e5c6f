"""A step is taken as a whole or not at all: what fails in it fails before a weight or a number of
the state moves.
"""

import copy
import itertools
import math
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from tiny import assert_same, backward, batches, train, twins, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon, split_rows
from torch_thor.curvature import refresh

STREAM = batches(8, dtype=torch.float32)
MODES = {
    "plain": partial(THOR, trace_thresholds=(0.0, 0.0)),
    "nesterov": partial(THOR, trace_thresholds=(0.0, 0.0), nesterov=True),
    "orthogonal": ThorMuon,
}


def pair(mode, steps, **options):
    """Two alike, after so many steps: one meets the fault. Norms come before and between the layers
    with factors.
    """
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


# ------------------------------------------------------------------------------- faults of one step


class Bug(Exception):
    pass


def bug(*_, **__):
    raise Bug("the user's own")


def loss_terms(optimizer, patch):
    patch.setattr(optimizer, "loss_terms", bug)
    return Bug, "the user's own"


def update_interval(optimizer, patch):
    patch.setitem(optimizer.param_groups[0], "update_interval", bug)
    return Bug, "the user's own"


def memory(where, optimizer, patch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    patch.setattr(*where, out_of_memory)
    return torch.OutOfMemoryError, "out of memory"


def split_dim(value, optimizer, patch):
    patch.setitem(optimizer.param_groups[0], "split_dim", value)
    return (
        RuntimeError,
        rf"split_dim={value}: A of layer '1' has shape \(5, 4\) and needs .*put it back",
    )


def gathered_in_other_blocks(optimizer, _):
    (group,) = optimizer.param_groups
    optimizer.zero_grad()
    group["split_dim"] = 2
    backward(optimizer.model, STREAM[0])
    group["split_dim"] = 4
    return RuntimeError, r"split_dim=4: .*'1'.*call zero_grad\(\)"


def not_finite(optimizer, _):
    optimizer.model[4].weight.grad[0, 0] = torch.nan
    return FloatingPointError, r"step \d: .*4\.weight.*nonfinite = \"skip\""


def shape(optimizer, patch):
    patch.setattr(optimizer.model[4].weight, "data", torch.randn(7, 6))
    return RuntimeError, r"'4(\.weight)?' has shape .* and needs .*weight .* was changed"


def by_hand(optimizer, _):
    """Gradients in the place of those that zero_grad() has dropped."""
    optimizer.zero_grad()
    for parameter in optimizer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    told = r"layers 1, 4, 6 have gradients and no statistics.*zero_grad\(\) came between"
    return RuntimeError, rf"(?s){told} loss.backward\(\) and step\(\).*change them in place"


def flat(optimizer, patch):
    """DeepSpeed's ZeRO and bf16 optimizers put one flat float32 tensor into each group, and set its
    gradient.
    """
    parameters = list(optimizer.model.parameters())
    one = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    one.grad = torch.cat([p.grad.flatten() for p in parameters])
    patch.setitem(optimizer.param_groups[0], "params", [one])
    return RuntimeError, r"flat tensors.*ZeRO.*fully_shard, then the optimizer.*DistributedDataPara"


def option(name, value, rule, optimizer, patch):
    patch.setitem(optimizer.param_groups[0], name, value)
    return ValueError, f"{name}={re.escape(repr(value))}: {name} must be {rule}"


def lost_option(optimizer, patch):
    patch.delitem(optimizer.param_groups[0], "max_update_ratio")
    return ValueError, "group 0 has no 'max_update_ratio' any more.*put it back"


def pre_hook(optimizer, patch):
    patch.setitem(optimizer._optimizer_step_pre_hooks, 0, bug)
    return Bug, "the user's own"


# name: what is done between backward pass and step, and after how many steps; a refresh is due in
# steps 0 and 3
FAULTS = {
    "loss_terms": (loss_terms, (0, 1, 3)),
    "update_interval": (update_interval, (0, 3)),  # between refreshes nobody asks it
    "memory of the trace rule": (partial(memory, (refresh.Candidate, "judge")), (0, 3)),
    "memory of the inverses": (partial(memory, (refresh, "invert_")), (0, 3)),
    "smaller blocks": (partial(split_dim, 2), (1, 3)),
    "whole matrices": (partial(split_dim, None), (1, 3)),
    "gathered in other blocks": (gathered_in_other_blocks, (0, 3)),
    "not finite": (not_finite, (0, 1, 3)),
    "shape": (shape, (1, 3)),
    "gradients by hand": (by_hand, (0, 3)),
    "flat parameters": (flat, (0,)),
    "lr": (partial(option, "lr", None, "a finite number"), (0, 1, 3)),
    "momentum": (partial(option, "momentum", 1.0, "in"), (0, 1, 3)),
    "bound": (partial(option, "max_update_ratio", "x", "None or a number"), (0, 1, 3)),
    "weight decay": (partial(option, "weight_decay", [0.1], "a finite number"), (0, 1, 3)),
    "counter": (partial(option, "step", None, "a whole number"), (0, 1, 3)),
    "lost option": (lost_option, (0, 1, 3)),
    "hook before the step": (pre_hook, (0, 1, 3)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails_changes_nothing(fault, monkeypatch):
    """Weights, state, which layers are due: as before. When the fault is mended, training goes on
    as without it.
    """
    make, when = FAULTS[fault]
    for mode, steps in itertools.product(MODES, when):
        (model, optimizer), (twin, other) = pair(mode, steps)
        backward(model, STREAM[steps])
        before = weights(model), copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patch:
            error, message = make(optimizer, patch)
            with pytest.raises(error, match=message):
                optimizer.step()
        where = f"{mode}, step {steps}"
        assert_same(weights(model), before[0], where)
        if steps or error is not torch.OutOfMemoryError:
            assert_same(optimizer.state_dict(), before[1], where)
        assert all(layer.due == (steps != 1) for layer in optimizer.curvature.values()), where
        if fault != "hook before the step":  # there step() does not begin
            assert not optimizer.last_refresh, where
        optimizer.zero_grad()
        for one, its in ((model, optimizer), (twin, other)):
            train(one, its, STREAM[steps:])
        assert_same(weights(model), weights(twin), where)
        assert_same(optimizer.state_dict(), other.state_dict(), where)


def test_warnings_that_are_errors_come_when_the_step_is_over():
    """What the step had to say was raised by the first layer in trouble, with the refresh half
    done.
    """
    (model, optimizer), (twin, other) = pair("plain", 3)
    for one, its in ((model, optimizer), (twin, other)):
        backward(one, STREAM[3])
        its.curvature["1"].statistics.sums()[0].rows[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="layer '1': its new factors hold NaN"):
            optimizer.step()
    with pytest.warns(RuntimeWarning, match="layer '1'") as caught:
        other.step()
    assert caught[0].filename == __file__
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())


# -------------------------------------------------------------------- what is changed between steps


def test_a_split_dim_that_cuts_nothing_else_is_no_error():
    (model, optimizer), _ = pair("plain", 1, split_dim=128)
    optimizer.param_groups[0]["split_dim"] = 64
    train(model, optimizer, STREAM[1:])


def test_a_model_that_is_converted_takes_its_state_along():
    """From float32 to float64: the run that follows is that of a float64 state of the same
    numbers.
    """
    for mode, (steps, momentum) in itertools.product(
        MODES, ((1, 0.9), (2, 0.9), (3, 0.9), (2, 0.0))
    ):
        (model, optimizer), (twin, other) = pair(mode, steps, momentum=momentum)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            tensors = {
                key: value
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and key != "step"
            }
            state.update({key: value.double() for key, value in tensors.items()})
        stream = [(x.double(), labels) for x, labels in STREAM[steps:]]
        model.double()
        twin.double()
        other.load_state_dict(saved)
        for one, its in ((model, optimizer), (twin, other)):
            train(one, its, stream)
        assert_same(weights(model), weights(twin), mode)
        assert_same(optimizer.state_dict(), other.state_dict(), mode)
        # half precision keeps float32 state
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            model.to(dtype)
            train(model, optimizer, [(x.to(dtype), labels) for x, labels in STREAM])
            for state in optimizer.state.values():
                assert all(
                    v.dtype == torch.float32 for v in state.values() if isinstance(v, torch.Tensor)
                ), mode


# ------------------------------------------------------------------------ modules that are replaced


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 3))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def replace_module(model):
    model.head[0] = nn.Linear(6, 3)
    return ["head.0.weight", "head.0.bias"]


def replace_weight(model):
    model.head[0].weight = nn.Parameter(torch.randn(3, 6))
    return ["head.0.weight"]


@pytest.mark.parametrize("make", [THOR, ThorMuon])
@pytest.mark.parametrize("replace", [replace_module, replace_weight])
def test_what_was_replaced_is_said_once_and_can_be_given(replace, make):
    """Before or after it was told of; then it is preconditioned from its first step on."""
    for steps, told in itertools.product((0, 1, 3), (False, True)):
        model = Net()
        optimizer = make(model, update_interval=3)
        train(model, optimizer, STREAM[:steps])
        new = replace(model)
        if told:
            listed = {entry.name: entry.reason for entry in optimizer.coverage()}
            assert "not trained" in listed["head.0.weight"]
            still = {name: model.get_parameter(name).detach().clone() for name in new}
            with pytest.warns(RuntimeWarning) as caught:
                train(model, optimizer, STREAM * 2)
            [message] = [str(w.message) for w in caught]
            assert "layer 'head.0' is no longer" in message
            assert (
                f"not trained, are {', '.join(new)}: give them to optimizer.add_param_group("
                in message
            )
            assert set(optimizer.curvature) == {"body"}
            assert_same({name: model.get_parameter(name).detach() for name in new}, still)
            assert optimizer.curvature["body"].refreshes >= 1
        optimizer.add_param_group({"params": [model.get_parameter(name) for name in new]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, STREAM[:3])
        assert optimizer.curvature["head.0"].refreshes >= 1
        before = weights(model)
        train(model, optimizer, STREAM)
        assert not torch.equal(before["head.0.weight"], model.head[0].weight)


def test_modules_that_were_replaced_together_are_said_in_one_warning():
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(8)), nn.Linear(5, 3))
    optimizer = THOR(model, update_interval=2)
    for i in range(7):
        model[i] = nn.Linear(5, 5)
    with pytest.warns(RuntimeWarning) as caught:
        train(model, optimizer, STREAM[:3])
    (message,) = [str(w.message) for w in caught]
    assert "layer '0' (likewise '1', '2', '3', '4', '5' and 1 more) is no longer" in message
    assert "not trained, are 0.weight, 0.bias" in message


def test_replacing_the_only_layer_is_the_documented_error():
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = THOR(model)
    model[0] = nn.Linear(5, 3)
    backward(model, STREAM[0])
    for call in (optimizer.step, optimizer.coverage):
        with pytest.raises(
            RuntimeError,
            match=r"'0.weight' is in none of the optimizer's parameter groups.*Make it",
        ):
            call()


def test_a_module_that_is_wrapped_in_place_is_still_there():
    """Under its new name, once the plan is made anew, as a bias that is frozen makes it."""
    model, optimizer, twin, other = twins(THOR, Net, update_interval=2)
    model.head = nn.Sequential(model.head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one, its in ((model, optimizer), (twin, other)):
            train(one, its, STREAM[:3])
            one.body.bias.requires_grad_(False)
            train(one, its, STREAM[3:])
    assert set(optimizer.curvature) == {"body", "head.0.0"}
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- what a subclass, a default dtype and a late declaration do ----------------------------------


class Forwarding(ThorMuon):
    """A subclass that names none of its arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_a_subclass_that_hands_its_arguments_on_steps_and_is_told_the_default():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = Forwarding(model, lr=0.001)
    with pytest.warns(RuntimeWarning, match=r"Forwarding: lr=0\.001 is below 0\.008, the least"):
        train(model, optimizer, STREAM + STREAM)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr=-1\.0: lr must be .*start from 0\.08"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, partial(AGCSGD, lr=0.1, momentum=0.9)])
def test_another_default_dtype_changes_nothing(make, dtype):
    """Weights, and the dtypes of all state; a counter in half precision would stick at 256."""
    found = []
    for default in (torch.float32, dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        torch.set_default_dtype(default)
        try:
            optimizer = make(model)
            train(model, optimizer, STREAM)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((weights(model), optimizer.state_dict()["state"]))
    assert_same(*found)


def test_a_declaration_of_rows_after_the_optimizer_was_made_holds_for_the_next():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    twin = copy.deepcopy(model)
    optimizer, other = ThorMuon(model), ThorMuon(twin)
    train(model, optimizer, STREAM[:2])
    train(twin, other, STREAM[:2])
    split_rows(model[0], (4, 4))
    train(model, optimizer, STREAM[2:])
    train(twin, other, STREAM[2:])
    assert_same(weights(model), weights(twin))
    with pytest.raises(ValueError, match=r"'0': \(4, 4\) must add up to its 6 outputs"):
        ThorMuon(model)


@pytest.mark.parametrize("make", [LAMB, partial(AGCSGD, lr=0.1, momentum=0.9)])
def test_lamb_and_agc_sgd_change_nothing_where_an_option_is_wrong(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = make(model)
    train(model, optimizer, STREAM[:2])
    backward(model, STREAM[2])
    before = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    (group,) = optimizer.param_groups
    for name in ("lr", "weight_decay", "eps"):
        for wrong in (None, "x", -1.0, [0.1], math.nan):
            own, group[name] = group[name], wrong
            with pytest.raises(ValueError, match=f"{name}=.*: {name} must be"):
                optimizer.step()
            del group[name]
            with pytest.raises(ValueError, match=f"group 0 has no '{name}' any more"):
                optimizer.step()
            group[name] = own
    assert_same((weights(model), optimizer.state_dict()["state"]), before)
