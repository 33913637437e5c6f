"""Gradients without statistics on a step that refreshes: the error names what was found, and the
remedy.
"""

import copy

import pytest
import torch
from torch import nn

from tiny import assert_same, backward, batches, cross_entropy, told, train, weights
from torch_thor import THOR, ThorMuon

BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
STREAM = batches(6, dtype=torch.float32)


def build(make, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, make(model, update_interval=1, **options)


def loss_of(model, batch):
    x, labels = batch
    return cross_entropy(labels)(model(x))


def by_autograd_grad(model, optimizer):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, STREAM[0]), parameters)
    optimizer.zero_grad()  # in the middle, as some loops have it
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def by_inputs_and_weights(model, optimizer):
    """As the stages of a zero-bubble pipeline do."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    x = STREAM[0][0].clone().requires_grad_()
    loss = loss_of(model, (x, STREAM[0][1]))
    _, parts = stage_backward_input([loss], None, [x], iter(model.parameters()))
    stage_backward_weight(iter(model.parameters()), parts)


def replicas(model, count=2):
    """As torch.nn.parallel.replicate makes them: other modules, with copies of the parameters."""
    made = []
    for _ in range(count):
        copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, twin in copies.items():
            for name, child in module._modules.items():
                setattr(twin, name, copies[child])
            for name, parameter in module._parameters.items():
                setattr(twin, name, parameter * 1)
        made.append(copies[model])
    return made


def by_replicas(model, _):
    x, labels = STREAM[0]
    parts = zip(replicas(model), x.chunk(2), strict=True)
    cross_entropy(labels)(torch.cat([replica(part) for replica, part in parts])).backward()


def by_zero_grad(model, optimizer):
    backward(model, STREAM[0])
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def by_a_copy(model, _):
    twin = copy.deepcopy(model)
    backward(twin, STREAM[0])
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        parameter.grad = other.grad


CAUSES = {
    by_autograd_grad: r"torch\.autograd\.grad.*Call loss\.backward\(\).*layers=",
    by_inputs_and_weights: r"split into one for inputs and one for weights.*Schedule1F1B",
    by_replicas: r"torch\.nn\.DataParallel ran replicas.*DistributedDataParallel.*CUDA_VISIBLE",
    by_zero_grad: r"zero_grad\(\) came between loss\.backward\(\) and step\(\).*p\.grad\.copy_",
    by_a_copy: r"no forward and backward pass.*a compiled or copied model.*Call loss\.backward\(\)",
}


@BOTH
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_the_error_names_the_cause(make, cause):
    """In the first step and in a later one; nothing has changed, and the training can go on."""
    model, optimizer = build(make)
    for steps in (0, 2):
        train(model, optimizer, STREAM[1 : 1 + steps])
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        cause(model, optimizer)
        with pytest.raises(RuntimeError, match=rf"(?s)layers 0, 2 have .* {CAUSES[cause]}"):
            optimizer.step()
        assert_same(weights(model), before)
        assert_same(optimizer.state_dict(), state)
        optimizer.zero_grad()
    train(model, optimizer, STREAM[1:2])
    assert all(layer.refreshes for layer in optimizer.curvature.values())


@BOTH
def test_what_was_found_is_forgotten_with_the_step(make):
    """The cause of one step is not that of the next."""
    model, optimizer = build(make)
    for cause in (*CAUSES, *reversed(CAUSES)):
        cause(model, optimizer)
        with pytest.raises(RuntimeError, match=f"(?s){CAUSES[cause]}"):
            optimizer.step()
        optimizer.zero_grad()


@BOTH
def test_one_layer_alone(make):
    """The others have statistics: a warning names the cause, and the training goes on."""
    for own, cause in (
        (replica_of, "a replica of torch.nn.DataParallel"),
        (lambda layer: layer, "its gradient came from torch.autograd.grad"),
    ):
        model, optimizer = build(make)
        first = own(model[0])
        x, labels = STREAM[0]
        h = first(x)
        loss = cross_entropy(labels)(model[2](torch.tanh(h)))
        if first is model[0]:
            of_first = list(model[0].parameters())
            for p, g in zip(
                of_first, torch.autograd.grad(loss, of_first, retain_graph=True), strict=True
            ):
                p.grad = g
            loss.backward(inputs=list(model[2].parameters()))
        else:
            loss.backward()
        (message,) = told(optimizer.step)
        assert "layer '0': it has a gradient and no statistics: " in message
        assert cause in message
        assert [layer.refreshes for layer in optimizer.curvature.values()] == [0, 1]


def replica_of(layer):
    return replicas(nn.Sequential(layer), 1)[0][0]


@BOTH
def test_a_state_that_is_loaded_between_backward_and_step(make):
    """The statistics of the step stay, as its gradients do; where the state needs statistics that
    the state before did not, the error names it.
    """
    model, optimizer = build(make)
    twin, other = build(make)
    for one, its in ((model, optimizer), (twin, other)):
        train(one, its, STREAM[:2])
        backward(one, STREAM[2])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for its in (optimizer, other):
        its.step()
        its.zero_grad()
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())

    model, optimizer = build(make)
    first = copy.deepcopy(optimizer.state_dict())  # refreshes in its first step
    optimizer.param_groups[0]["update_interval"] = 10
    train(model, optimizer, STREAM[:2])
    backward(model, STREAM[2])
    optimizer.load_state_dict(first)
    with pytest.raises(
        RuntimeError,
        match=r"layers 0, 2 have .*because load_state_dict\(\) came between loss\.backward\(\) and "
        r"step\(\).*Load it before the forward pass, or call zero_grad\(\) and repeat",
    ):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, STREAM[2:4])
    assert all(layer.refreshes == 2 for layer in optimizer.curvature.values())


@BOTH
def test_a_state_without_a_refresh_drops_the_statistics(make):
    """They would count in the next refresh else."""
    model, optimizer = build(make)
    optimizer.param_groups[0]["update_interval"] = 2
    train(model, optimizer, STREAM[:1])
    between = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, STREAM[1:2])
    backward(model, STREAM[2])  # of a step that refreshes
    optimizer.load_state_dict(between)
    optimizer.step()
    optimizer.zero_grad()
    twin, other = build(make)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    for one, its in ((model, optimizer), (twin, other)):
        train(one, its, STREAM[3:5])
    assert_same(weights(model), weights(twin))


@BOTH
def test_a_group_that_is_added_between_backward_and_step_waits_for_the_next(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = make(list(model[2].parameters()), model=model, update_interval=1)
    backward(model, STREAM[0])
    optimizer.add_param_group({"params": list(model[0].parameters())})
    assert not told(optimizer.step)
    optimizer.zero_grad()
    assert [layer.refreshes for layer in optimizer.curvature.values()] == [0, 1]
    train(model, optimizer, STREAM[1:2])
    assert optimizer.curvature["0"].refreshes == 1
