"""What torch and its ecosystem expect of any optimizer."""

import copy
import inspect
import itertools
import warnings
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR, ThorMuon


def twins(make=THOR, **options):
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    return model, make(model, **options), twin, make(twin, **options)


def backward(model, batch):
    x, labels = batch
    loss = cross_entropy(labels)(model(x))
    loss.backward()
    return loss


@pytest.mark.parametrize("make", [THOR, ThorMuon])
def test_is_an_optimizer_with_the_methods_of_sgd(make):
    """Its options stand in the groups, and wrappers call its methods by position and by name."""
    optimizer = make(mlp())
    assert isinstance(optimizer, torch.optim.Optimizer)
    apart = {"self", "params", "model", "layers", "distributed", "loss_reduction", "fisher"}
    options = inspect.signature(make).parameters.keys() - apart
    assert options <= optimizer.defaults.keys() & optimizer.param_groups[0].keys()

    def shape(method):
        return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]

    for name, method in inspect.getmembers(torch.optim.SGD, inspect.isfunction):
        if not name.startswith("_"):
            assert shape(getattr(make, name)) == shape(method)


def test_gradients_dtypes_and_storage_are_kept():
    """The gradient of a plain parameter may be its direction: nothing is added or scaled in place."""
    cases = [(THOR, {"nesterov": True, "kl_clip": 1e-4}), (THOR, {"momentum": 0.0}), (THOR, {}), (ThorMuon, {})]
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for (make, options), dtype in itertools.product(cases, dtypes):
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)
        optimizer = make(model, weight_decay=0.5, update_interval=2, **options)
        kept = [(p, p.data_ptr(), p.dtype, p.stride()) for p in model.parameters()]
        for batch in batches(3, dtype=dtype):
            backward(model, batch)
            before = [(p.grad, p.grad.clone()) for p in model.parameters()]
            optimizer.step()
            for parameter, (grad, value) in zip(model.parameters(), before, strict=True):
                assert parameter.grad is grad, (make, options, dtype)
                assert torch.equal(grad, value), (make, options, dtype)
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        for parameter, (old, *rest) in zip(model.parameters(), kept, strict=True):
            assert parameter is old
            assert [parameter.data_ptr(), parameter.dtype, parameter.stride()] == rest


# ------------------------------------------------------- loops that train as the ordinary one, to the last bit


def zeroed(model, optimizer, stream):
    for batch in stream:
        backward(model, batch)
        assert optimizer.step() is None
        optimizer.zero_grad(set_to_none=False)
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def given_up(zero_grad, model, optimizer, stream):
    """A backward pass whose gradients are thrown away does not count; `model.zero_grad()` is as common as ours."""
    for x, labels in stream:
        backward(model, (10 * x, labels))
        zero_grad(model, optimizer)
        backward(model, (x, labels))
        optimizer.step()
        model.zero_grad()


def evaluated(model, optimizer, stream):
    """Only forward passes that a gradient came back for are statistics."""

    def evaluate():
        with torch.no_grad():
            model(noise)
        with torch.inference_mode():
            model(noise)
        if isinstance(optimizer, THOR):  # ThorMuon's A sees all that builds a graph
            model(noise)

    noise = torch.randn(50, 5).double() * 100
    for x, labels in stream:
        evaluate()
        output = model(x)
        evaluate()
        cross_entropy(labels)(output).backward()
        evaluate()
        optimizer.step()
        optimizer.zero_grad()


def closure(model, optimizer, stream):
    """By position and by name, also under no_grad."""
    losses = []

    def evaluate(batch):
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(backward(model, batch))
        return losses[-1]

    for i, batch in enumerate(stream):
        one = partial(evaluate, batch)
        with torch.set_grad_enabled(i % 2 == 0):
            assert (optimizer.step(one) if i % 2 else optimizer.step(closure=one)) is losses[-1]


def hooked_and_patched(model, optimizer, stream):
    """Schedulers wrap `optimizer.step`; so do profilers."""
    original, seen = optimizer.step, []

    def wrapped(*args, **kwargs):
        seen.append(None)
        return original(*args, **kwargs)

    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(weights(model)))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(weights(model)))
    optimizer.step = wrapped
    for batch in stream:
        seen.clear()
        before = weights(model)
        train(model, optimizer, [batch])
        assert_same(seen, [None, before, weights(model)])


def accelerated(model, optimizer, stream):
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for x, labels in stream:
        accelerator.backward(cross_entropy(labels)(wrapped(x)))
        optimizer.step()
        optimizer.zero_grad()


def probed(probe, model, optimizer, stream):
    """What fills no `.grad` leaves no trace, and works as without the optimizer, on a refresh step too."""
    for x, labels in stream:
        probe(model, 10 * x, labels)
        train(model, optimizer, [(x, labels)])
    assert optimizer.curvature["0"].rows_per_term == 1


def by_input(model, x, labels):
    """Saliency, adversarial examples."""
    probe = x.clone().requires_grad_()
    torch.autograd.grad(100 * cross_entropy(labels)(model(probe)), [probe])


def by_parameters(model, x, labels):
    """A logger of gradient norms, meta-learning; loss weights from the gradient of the last shared layer."""
    for parameters in (list(model.parameters()), [model[2].weight]):
        torch.autograd.grad(100 * cross_entropy(labels)(model(x)), parameters)


def functionally(model, x, labels):
    """`torch.func`, over parameters of its own; also gradients of single examples."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(ps, one, label):
        return cross_entropy(label)(torch.func.functional_call(model, ps, (one,)))

    torch.func.grad(loss)(parameters, x, labels)
    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x[:, None], labels[:, None])


LOOPS = {
    "zeroed": zeroed,
    "closure": closure,
    "hooked and patched": hooked_and_patched,
    "accelerated": accelerated,
    "evaluated": evaluated,
    "given up, by the model": partial(given_up, lambda model, optimizer: model.zero_grad()),
    "given up, by the optimizer": partial(given_up, lambda model, optimizer: optimizer.zero_grad()),
    "given up, to zeros": partial(given_up, lambda model, optimizer: optimizer.zero_grad(set_to_none=False)),
    **{f"probed {probe.__name__}": partial(probed, probe) for probe in (by_input, by_parameters, functionally)},
}


@pytest.mark.parametrize("name", LOOPS)
def test_other_loops_train_as_the_ordinary_one(name):
    for make in (THOR, ThorMuon):
        if make is THOR or not name.startswith("probed"):  # ThorMuon's A sees all forward passes
            model, optimizer, twin, other = twins(make, update_interval=2)
            LOOPS[name](model, optimizer, batches(5))
            train(twin, other, batches(5))
            assert_same(weights(model), weights(twin), f"{make.__name__}: weights")


def test_schedulers_drive_learning_rate_and_momentum():
    """As by hand with the numbers of SGD's groups; a learning rate that is a tensor stays one. At 0 nothing moves."""
    for tensor, (name, make) in itertools.product(
        (False, True),
        {
            "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=7),
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
            "to_zero": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: max(0.0, 1 - step / 3)),
            "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        }.items(),
    ):
        lr = torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5
        model, optimizer, twin, other = twins(lr=lr, update_interval=2, nesterov=tensor, weight_decay=0.1)
        sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=copy.deepcopy(lr), momentum=0.9)
        (group,) = sgd.param_groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedulers = make(optimizer), make(sgd)
        for batch in batches(6):
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(float(group["lr"]), rel=1e-6), name
            assert optimizer.param_groups[0]["momentum"] == group["momentum"]
            other.param_groups[0].update(lr=float(optimizer.param_groups[0]["lr"]), momentum=group["momentum"])
            before = weights(model)
            train(model, optimizer, [batch])
            train(twin, other, [batch])
            assert group["lr"] or before["0.weight"].equal(model[0].weight), name
            sgd.step()
            for scheduler in schedulers:
                scheduler.step(*([1.0] if name == "plateau" else []))
        assert type(optimizer.param_groups[0]["lr"]) is type(group["lr"]), name
        assert_same(weights(model), weights(twin), name)


# -------------------------------------------------------------------------------------------- groups


def test_model_parameters_named_parameters_and_groups_are_the_same():
    for given in (
        lambda twin: twin.parameters(),
        lambda twin: twin.named_parameters(),
        lambda twin: [{"params": twin.parameters()}, {"params": []}],
    ):
        model, optimizer, twin, _ = twins()
        other = THOR(given(twin), model=twin)
        train(model, optimizer, batches(3))
        train(twin, other, batches(3))
        assert_same(weights(model), weights(twin))


def test_add_param_group_in_the_middle_of_training():
    """Gradual unfreezing, the other way: the new layer gets its factors, the old ones are left as they are."""
    model, stream = mlp(), batches(6)
    optimizer = THOR(model[:4].parameters(), model=model, update_interval=1, trace_thresholds=(0.0, 0.0))
    train(model, optimizer, stream[:3])
    before = model[4].weight.detach().clone()
    model.zero_grad()  # the untrained layer has gathered gradients that no one dropped
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.01})
    train(model, optimizer, stream[3:])
    assert {name: curvature.refreshes for name, curvature in optimizer.curvature.items()} == {"0": 6, "2": 6, "4": 3}
    assert not torch.equal(model[4].weight, before)


# ---------------------------------------------------------------------------------- other ways to backward


def test_retained_graph_counts_once():
    """Two backward passes through one graph are one batch, with the sum of both losses."""
    model, optimizer, twin, other = twins()
    x, labels = batches(1)[0]
    loss = cross_entropy(labels)(model(x)) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    train(twin, other, [(x, labels)])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, twin.get_parameter(name), rtol=1e-10, atol=1e-12)


def test_gradient_penalty():
    """A second backward through the first: gradients are finite, the loop runs, T is that of one pass."""
    model, optimizer, _, _ = twins(update_interval=2)
    for x, labels in batches(3):
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (cross_entropy(labels)(output) + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.curvature["0"].refreshes >= 1
    assert all(p.isfinite().all() for p in model.parameters())
