"""What torch and its ecosystem expect of any optimizer, for all four optimizers."""

import copy
import inspect
import itertools
from functools import partial

import pytest
import torch
from torch import nn

import every_kind
from tiny import assert_same, backward, batches, cross_entropy, mlp, train, twins, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

OPTIONS = {
    THOR: {"update_interval": 2},
    ThorMuon: {"update_interval": 2},
    LAMB: {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-4, "exclude": ["*.bias", "2"]},
    AGCSGD: {"lr": 0.1, "momentum": 0.9, "clip_factor": 0.05, "exclude": "2.*"},
}
ALL = pytest.mark.parametrize("make", OPTIONS)


def pair(make, **options):
    return twins(make, **{**OPTIONS[make], **options})


@ALL
def test_is_an_optimizer_with_the_methods_of_sgd(make):
    """Wrappers call them by position and by name."""
    assert isinstance(make(mlp()), torch.optim.Optimizer)

    def shape(method):
        return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]

    for name, method in inspect.getmembers(torch.optim.SGD, inspect.isfunction):
        if not name.startswith("_"):
            assert shape(getattr(make, name)) == shape(method)


CASES = [
    (THOR, {"nesterov": True, "kl_clip": 1e-4}),
    (THOR, {"momentum": 0.0}),
    (ThorMuon, {}),
    (LAMB, {"maximize": True}),
    (AGCSGD, {"foreach": False}),
    # torch's foreach SGD adds Nesterov's momentum into what it is given
    (AGCSGD, {"nesterov": True, "foreach": True, "weight_decay": 0.0, "clip_factor": 0.01}),
]


def test_gradients_dtypes_and_storage_are_kept():
    """The gradient of a plain parameter may be its direction: nothing is added in place."""
    for (make, options), dtype in itertools.product(CASES, (torch.float64, torch.float16)):
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)
        optimizer = make(model, **{**OPTIONS[make], "weight_decay": 0.5, **options})
        kept = [(p, p.data_ptr(), p.dtype, p.stride()) for p in model.parameters()]
        for batch in batches(3, dtype=dtype):
            backward(model, batch)
            before = [(p.grad, p.grad.clone()) for p in model.parameters()]
            optimizer.step()
            for parameter, (grad, value) in zip(model.parameters(), before, strict=True):
                assert parameter.grad is grad, (make, options, dtype)
                assert torch.equal(grad, value), (make, options, dtype)
            optimizer.zero_grad()
        for parameter, (old, *rest) in zip(model.parameters(), kept, strict=True):
            assert parameter is old
            assert [parameter.data_ptr(), parameter.dtype, parameter.stride()] == rest


# ------------------------------------------ loops that train as the ordinary loop, to the last bit


def given_up(model, optimizer, stream):
    """A backward pass whose gradients are thrown away does not count."""
    for i, (x, labels) in enumerate(stream):
        zero_grad = partial(optimizer.zero_grad, set_to_none=i % 2 == 1)
        backward(model, (10 * x, labels))
        zero_grad()
        backward(model, (x, labels))
        assert optimizer.step() is None
        zero_grad()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def out_of_memory(model, optimizer, stream):
    """The backward pass of a batch raises; the loop catches that and leaves the batch out."""

    def fail(_):
        raise RuntimeError("out of memory")

    for x, labels in stream:
        hidden = model[:2](x)
        hidden.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            cross_entropy(labels)(model[2:](hidden)).backward()
        optimizer.zero_grad()
        train(model, optimizer, [(x, labels)])


def evaluated(model, optimizer, stream):
    """Evaluations before, between and after the passes of a step do not count."""

    def evaluate():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model(torch.randn(50, 5).double() * 100)

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
        with torch.set_grad_enabled(i % 2 == 0):
            call = partial(evaluate, batch)
            assert (optimizer.step(call) if i % 2 else optimizer.step(closure=call)) is losses[-1]


def hooked(model, optimizer, stream):
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(weights(model)))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(weights(model)))
    for batch in stream:
        seen.clear()
        before = weights(model)
        train(model, optimizer, [batch])
        assert_same(seen, [before, weights(model)])


def probed(model, optimizer, stream):
    """Gradients of each sample by `torch.func`, which fill no `.grad`."""

    def loss(parameters, x, label):
        return cross_entropy(label)(torch.func.functional_call(model, parameters, (x,)))

    for x, labels in stream:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        of_samples = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        of_samples(parameters, x[:, None], labels[:, None])
        train(model, optimizer, [(x, labels)])


OURS = (THOR, ThorMuon)
LOOPS = {
    closure: OPTIONS,
    hooked: OPTIONS,
    given_up: OPTIONS,
    evaluated: OURS,
    out_of_memory: OURS,
    probed: OURS,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_other_loops_train_as_the_ordinary_one(loop):
    for make in LOOPS[loop]:
        model, optimizer, twin, other = pair(make)
        loop(model, optimizer, batches(5))
        train(twin, other, batches(5))
        assert_same(weights(model), weights(twin), f"{make.__name__}: weights")


SCHEDULERS = {
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=7),
    "to_zero": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: max(0.0, 1 - step / 3)),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@ALL
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_learning_rate_and_momentum(name, make):
    """As they drive an optimizer of torch, and as by hand. At a rate of 0 nothing moves."""
    model, optimizer, twin, other = pair(make, lr=0.5, weight_decay=0.1)
    own = [nn.Parameter(torch.zeros(1))]
    torchs = torch.optim.Adam(own) if make is LAMB else torch.optim.SGD(own, momentum=0.9)
    (ours,), (theirs,) = optimizer.param_groups, torchs.param_groups
    key = "betas" if make is LAMB else "momentum"
    theirs.update({"lr": 0.5, key: ours[key]})
    schedulers = SCHEDULERS[name](optimizer), SCHEDULERS[name](torchs)
    for batch in batches(6):
        assert ours["lr"] == pytest.approx(theirs["lr"])
        assert ours[key] == theirs[key]
        other.param_groups[0].update({"lr": ours["lr"], key: ours[key]})
        before = weights(model)
        train(model, optimizer, [batch])
        train(twin, other, [batch])
        assert ours["lr"] or before["0.weight"].equal(model[0].weight)
        torchs.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "plateau" else []))
    assert_same(weights(model), weights(twin))


# --------------------------------------------------------------- other ways to give and to backward


GIVEN = {
    "parameters": lambda twin: twin.parameters(),
    "named": lambda twin: twin.named_parameters(),
    "groups": lambda twin: [{"params": twin.parameters()}, {"params": []}],
}


@ALL
@pytest.mark.parametrize("given", GIVEN)
def test_model_parameters_named_parameters_and_groups_are_the_same(given, make):
    model, optimizer, twin, _ = pair(make)
    other = make(GIVEN[given](twin), model=twin, **OPTIONS[make])
    train(model, optimizer, batches(3))
    train(twin, other, batches(3))
    assert_same(weights(model), weights(twin))


SETTINGS = [
    (torch.set_default_device, "meta", None),
    (torch.set_default_dtype, torch.float16, torch.float32),
]


@ALL
@pytest.mark.parametrize(("setting", "value", "usual"), SETTINGS)
def test_the_default_device_and_dtype_of_torch_change_nothing(setting, value, usual, make):
    """Weights, and all of the state; a counter in half precision would stick at 256."""

    def trained(default):
        model, stream = every_kind.build(), every_kind.stream()
        setting(default)
        try:
            optimizer = make(model)
            train(model, optimizer, stream[:4])
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(model, optimizer, stream[4:])
        finally:
            setting(usual)
        return weights(model), optimizer.state_dict()["state"]

    assert_same(trained(value), trained(usual))
