"""What torch and its ecosystem expect of any optimizer, of all four."""

import copy
import inspect
import itertools
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from test_agc import NoWaiting
from torch import nn

from tiny import assert_same, backward, batches, cross_entropy, mlp, train, twins, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon, split_rows

OPTIONS = {
    THOR: {"update_interval": 2},
    ThorMuon: {"update_interval": 2},
    LAMB: {
        "lr": 0.05,
        "betas": (0.8, 0.9),
        "eps": 1e-4,
        "weight_decay": 0.1,
        "exclude": ["*.bias", "2"],
    },
    AGCSGD: {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "clip_factor": 0.05,
        "exclude": "2.*",
    },
}
ALL = pytest.mark.parametrize("make", OPTIONS)


def pair(make, **options):
    return twins(make, **{**OPTIONS[make], **options})


@ALL
def test_is_an_optimizer_with_the_methods_of_sgd(make):
    """Its options stand in the groups, and wrappers call its methods by position and by name."""
    optimizer = make(mlp())
    assert isinstance(optimizer, torch.optim.Optimizer)
    apart = {
        "self",
        "params",
        "model",
        "layers",
        "distributed",
        "loss_reduction",
        "fisher",
        "exclude",
    }
    options = inspect.signature(make).parameters.keys() - apart
    assert options <= optimizer.defaults.keys() & optimizer.param_groups[0].keys()

    def shape(method):
        return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]

    for name, method in inspect.getmembers(torch.optim.SGD, inspect.isfunction):
        if not name.startswith("_"):
            assert shape(getattr(make, name)) == shape(method)


CASES = [
    *((THOR, options) for options in ({"nesterov": True, "kl_clip": 1e-4}, {"momentum": 0.0}, {})),
    (ThorMuon, {}),
    *(
        (make, options)
        for make in (LAMB, AGCSGD)
        for options in ({}, {"maximize": True}, {"foreach": False})
    ),
    # torch's foreach SGD adds Nesterov's momentum into what it is given; nothing is clipped, and
    # something
    *(
        (
            AGCSGD,
            {
                "nesterov": True,
                "clip_factor": clip,
                "exclude": exclude,
                "foreach": True,
                "weight_decay": 0.0,
            },
        )
        for clip, exclude in ((0.01, ()), (float("inf"), None), (0.01, "*"))
    ),
]


def test_gradients_dtypes_and_storage_are_kept():
    """The gradient of a plain parameter may be its direction: nothing is added or scaled in
    place.
    """
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for (make, options), dtype in itertools.product(CASES, dtypes):
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)
        optimizer = make(model, **{**OPTIONS[make], "weight_decay": 0.5, **options})
        kept = [(p, p.data_ptr(), p.dtype, p.stride()) for p in model.parameters()]
        for batch in batches(3, dtype=dtype):
            backward(model, batch)
            before = [(p.grad, p.grad.clone()) for p in model.parameters()]
            with NoWaiting() if make is AGCSGD else nullcontext():
                optimizer.step()
            for parameter, (grad, value) in zip(model.parameters(), before, strict=True):
                assert parameter.grad is grad, (make, options, dtype)
                assert torch.equal(grad, value), (make, options, dtype)
            optimizer.zero_grad()
        for parameter, (old, *rest) in zip(model.parameters(), kept, strict=True):
            assert parameter is old
            assert [parameter.data_ptr(), parameter.dtype, parameter.stride()] == rest


# -------------------------------------------- loops that train as the ordinary one, to the last bit


def given_up(model, optimizer, stream):
    """A backward pass whose gradients are thrown away does not count; `model.zero_grad()` is as
    common as ours.
    """
    ways = (model.zero_grad, partial(optimizer.zero_grad, set_to_none=False), optimizer.zero_grad)
    for (x, labels), zero_grad in zip(stream, itertools.cycle(ways)):
        backward(model, (10 * x, labels))
        zero_grad()
        backward(model, (x, labels))
        assert optimizer.step() is None
        zero_grad()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def raising(model, optimizer, stream):
    """Out of memory, a bug in a user's function: catch, zero_grad, go on."""

    def fail(_):
        raise RuntimeError("out of memory")

    for x, labels in stream:
        hidden = model[:2](x)
        hidden.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            cross_entropy(labels)(model[2:](hidden)).backward()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(3, 9).double())
        train(model, optimizer, [(x, labels)])


def skipping(model, optimizer, stream):
    """Also where the loop zeroes the gradients by itself and tells the optimizer nothing:
    statistics are dropped.
    """
    optimizer.nonfinite = "skip"
    for i, (x, labels) in enumerate(stream):
        for value, name in (
            (torch.nan, "2.weight"),
            (torch.inf, "2.weight"),
            (-torch.inf, "4.bias"),
        ):
            backward(model, (5 * x, labels))
            model.get_parameter(name).grad.view(-1)[0] = value  # as by a burst loss
            optimizer.step()
            optimizer.zero_grad() if i else model.zero_grad(set_to_none=False)
        assert optimizer.skipped_steps == 3 * (i + 1)
        train(model, optimizer, [(x, labels)])


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


def probed(model, optimizer, stream):
    """What fills no `.grad` leaves no trace, and works as without the optimizer, on a refresh step
    too.

    Saliency and adversarial examples; logged gradient norms and loss weights by the last shared
    layer; `torch.func` over parameters of its own, also for gradients of single examples.
    """

    def loss(ps, one, label):
        return cross_entropy(label)(torch.func.functional_call(model, ps, (one,)))

    for x, labels in stream:
        probe = (10 * x).requires_grad_()
        for inputs in ([probe], list(model.parameters()), [model[2].weight]):
            torch.autograd.grad(100 * cross_entropy(labels)(model(probe)), inputs)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        torch.func.grad(loss)(parameters, x, labels)
        torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
            parameters, x[:, None], labels[:, None]
        )
        train(model, optimizer, [(x, labels)])
    assert optimizer.curvature["0"].rows_per_term == 1


OURS = (THOR, ThorMuon)
LOOPS = {
    closure: OPTIONS,
    hooked_and_patched: OPTIONS,
    accelerated: OPTIONS,
    given_up: OPTIONS,
    evaluated: OURS,
    raising: OURS,
    skipping: OURS,
    probed: [THOR],  # ThorMuon's A sees all forward passes
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
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "to_zero": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: max(0.0, 1 - step / 3)),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@ALL
def test_schedulers_drive_learning_rate_and_momentum(make):
    """As by hand with the numbers of torch's groups; a learning rate that is a tensor stays one. At
    0 nothing moves.
    """
    for tensor, name in itertools.product((False, True), SCHEDULERS):
        lr = torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5
        model, optimizer, twin, other = pair(make, lr=lr, weight_decay=0.1)
        own = [nn.Parameter(torch.zeros(1))]
        torchs = torch.optim.Adam(own) if make is LAMB else torch.optim.SGD(own, momentum=0.9)
        (group,), key = torchs.param_groups, "betas" if make is LAMB else "momentum"
        group.update({"lr": copy.deepcopy(lr), key: optimizer.param_groups[0][key]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedulers = SCHEDULERS[name](optimizer), SCHEDULERS[name](torchs)
        for batch in batches(6):
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(
                float(group["lr"]), rel=1e-6
            ), name
            assert optimizer.param_groups[0][key] == group[key]
            other.param_groups[0].update(
                {"lr": float(optimizer.param_groups[0]["lr"]), key: group[key]}
            )
            before = weights(model)
            train(model, optimizer, [batch])
            train(twin, other, [batch])
            assert group["lr"] or before["0.weight"].equal(model[0].weight), name
            torchs.step()
            for scheduler in schedulers:
                scheduler.step(*([1.0] if name == "plateau" else []))
        assert type(optimizer.param_groups[0]["lr"]) is type(group["lr"]), name
        assert_same(weights(model), weights(twin), name)


# --------------------------------------------------------------- other ways to give and to backward


@ALL
def test_model_parameters_named_parameters_and_groups_are_the_same(make):
    for given in (
        lambda twin: twin.parameters(),
        lambda twin: twin.named_parameters(),
        lambda twin: [{"params": twin.parameters()}, {"params": []}],
    ):
        model, optimizer, twin, _ = pair(make)
        other = make(given(twin), model=twin, **OPTIONS[make])
        train(model, optimizer, batches(3))
        train(twin, other, batches(3))
        assert_same(weights(model), weights(twin))


def test_gradient_penalty():
    """A second backward through the first: gradients are finite, the loop runs, T is that of one
    pass.
    """
    model, optimizer, _, _ = pair(THOR)
    for x, labels in batches(3):
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (cross_entropy(labels)(output) + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.curvature["0"].refreshes >= 1
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, partial(AGCSGD, lr=0.1)])
def test_parts_in_torchscript_train_without_curvature(make):
    model = mlp()
    model[0] = torch.jit.script(model[0])
    optimizer, before = make(model), weights(model)
    train(model, optimizer, batches(3))
    for name, weight in weights(model).items():
        assert not weight.equal(before[name]), name
    if make in (THOR, ThorMuon):
        assert set(optimizer.curvature) == {"2", "4"}


class OfMany(nn.Module):
    """Layers of several kinds, projections in one weight, and a complex parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.fused, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.last = nn.Linear(6, 2)
        split_rows(self.fused, 3)

    def forward(self, words):
        x = self.words(words)
        x = self.norm(self.fused(x + self.mix(x, x, x)[0]))
        return self.last((x * self.turn).abs())


@pytest.mark.parametrize(
    "make",
    [
        partial(THOR, update_interval=2),
        partial(THOR, update_interval=2, kl_clip=1e-3),
        partial(ThorMuon, update_interval=2),
        LAMB,
        partial(AGCSGD, lr=0.1, momentum=0.9),
    ],
)
def test_the_default_device_of_torch_is_of_no_matter(make):
    """A program may have set it to an accelerator, where not all is to be."""

    def trained(device):
        generator, model = torch.Generator().manual_seed(0), OfMany()
        stream = [torch.randint(5, (3, 4), generator=generator) for _ in range(6)]
        torch.set_default_device(device)
        try:
            optimizer = make(model)
            for step, words in enumerate(stream):
                model(words).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 3:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                    assert repr(optimizer)
        finally:
            torch.set_default_device(None)
        return weights(model)

    assert_same(trained("meta"), trained(None))
