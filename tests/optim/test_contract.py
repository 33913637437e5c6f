"""What torch and its ecosystem expect of any optimizer."""

import inspect
import warnings
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from reference import ReferenceTHOR
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR, ThorMuon


def twins(make=THOR, **options):
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    return model, make(model, **options), twin, make(twin, **options)


def assert_close(model, reference, rtol=1e-8, atol=1e-10):
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=rtol, atol=atol)


def backward(model, batch):
    x, labels = batch
    loss = cross_entropy(labels)(model(x))
    loss.backward()
    return loss


def test_readme_loop():
    """Nothing but the constructor differs from any other optimizer, and the loss falls."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    loss_fn = nn.CrossEntropyLoss()
    centers = 2 * torch.randn(3, 8)
    labels = torch.randint(3, (120,))
    data = torch.utils.data.TensorDataset(centers[labels] + torch.randn(120, 8), labels)
    loader = torch.utils.data.DataLoader(data, batch_size=20)
    optimizer = THOR(model, lr=0.05, damping=0.03)
    first = loss_fn(model(data.tensors[0]), labels).item()
    for x, y in [batch for _ in range(5) for batch in loader]:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_fn(model(data.tensors[0]), labels).item() < 0.3 * first


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


def test_step_leaves_gradients_alone():
    """The gradient of a plain parameter may be its direction: nothing is added or scaled in place."""
    for make, options in (
        (THOR, {"nesterov": True, "kl_clip": 1e-4}),
        (THOR, {"momentum": 0.0}),
        (THOR, {}),
        (ThorMuon, {}),
    ):
        model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
        optimizer = make(model, weight_decay=0.5, update_interval=2, **options)
        for batch in batches(3):
            backward(model, batch)
            before = [(p.grad, p.grad.clone()) for p in model.parameters()]
            optimizer.step()
            for parameter, (grad, value) in zip(model.parameters(), before, strict=True):
                assert parameter.grad is grad
                assert torch.equal(grad, value)
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_storage_are_kept(dtype):
    model = mlp(dtype=dtype)
    before = [(p, p.data_ptr(), p.dtype, p.stride()) for p in model.parameters()]
    train(model, THOR(model, update_interval=1), batches(2, dtype=dtype))
    for parameter, (old, pointer, kind, stride) in zip(model.parameters(), before, strict=True):
        assert parameter is old
        assert (parameter.data_ptr(), parameter.dtype, parameter.stride()) == (pointer, kind, stride)


# ------------------------------------------------------- loops that train as the ordinary one, to the last bit


def zeroed(model, optimizer, stream):
    for batch in stream:
        backward(model, batch)
        assert optimizer.step() is None
        optimizer.zero_grad(set_to_none=False)
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def given_up_and_zeroed_by_the_model(model, optimizer, stream):
    """`model.zero_grad()` is as common as the optimizer's."""
    for batch in stream:
        backward(model, (10 * batch[0], batch[1]))
        model.zero_grad()
        backward(model, batch)
        optimizer.step()
        model.zero_grad()


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
        seen.append("step")
        return original(*args, **kwargs)

    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(weights(model)))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(weights(model)))
    optimizer.step = wrapped
    for batch in stream:
        before = weights(model)
        train(model, optimizer, [batch])
        step, then, after = seen
        assert step == "step"
        assert_same(before, then)
        assert_same(weights(model), after)
        seen.clear()


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
    """A logger of gradient norms, meta-learning."""
    torch.autograd.grad(100 * cross_entropy(labels)(model(x)), list(model.parameters()))


def by_some_parameters(model, x, labels):
    """Loss weights from the gradient of the last shared layer."""
    torch.autograd.grad(100 * cross_entropy(labels)(model(x)), [model[2].weight])


def functionally(model, x, labels):
    """`torch.func`, over parameters of its own."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda ps: cross_entropy(labels)(torch.func.functional_call(model, ps, (x,))))(parameters)


def example_by_example(model, x, labels):
    """Gradients of single examples."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(ps, one, label):
        return cross_entropy(label[None])(torch.func.functional_call(model, ps, (one[None],)))

    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, labels)


PROBES = [by_input, by_parameters, by_some_parameters, functionally, example_by_example]
LOOPS = [zeroed, given_up_and_zeroed_by_the_model, closure, hooked_and_patched, accelerated]


@pytest.mark.parametrize(
    ("loop", "make"),
    [
        *((loop, make) for loop in LOOPS for make in (THOR, ThorMuon)),
        *((partial(probed, probe), THOR) for probe in PROBES),  # ThorMuon's A sees all forward passes
    ],
)
def test_other_loops_train_as_the_ordinary_one(loop, make):
    model, optimizer, twin, other = twins(make, update_interval=2)
    loop(model, optimizer, batches(5))
    train(twin, other, batches(5))
    assert_same(weights(model), weights(twin))


# ---------------------------------------------------------------------------------------- schedulers


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("which", ["one_cycle", "cosine", "lambda", "plateau"])
def test_schedulers_drive_the_learning_rate(which, tensor):
    """As many steps of the reference, with the same learning rates and momenta read off SGD's groups."""
    lr = torch.tensor(0.05, dtype=torch.float64) if tensor else 0.05
    model = mlp()
    reference = ReferenceTHOR(model, update_interval=2)
    optimizer = THOR(model, lr=lr, update_interval=2)
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr.clone() if tensor else lr, momentum=0.9)
    make = {
        "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=7),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    }[which]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedulers = make(optimizer), make(sgd)
    for x, labels in batches(6):
        group = sgd.param_groups[0]
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(float(group["lr"]), rel=1e-6)
        reference.options.update(lr=float(group["lr"]), momentum=float(group["momentum"]))
        train(model, optimizer, [(x, labels)])
        reference.step((x, cross_entropy(labels)))
        sgd.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if which == "plateau" else []))
    assert type(optimizer.param_groups[0]["lr"]) is type(sgd.param_groups[0]["lr"])
    assert_close(model, reference.model, rtol=1e-6, atol=1e-9)


def test_warm_up_from_zero():
    """A first step of lr 0 with real gradients is a step: it refreshes and fills the momentum."""
    model = mlp()
    reference, optimizer = ReferenceTHOR(model, update_interval=3), THOR(model, update_interval=3)
    for step, (x, labels) in enumerate(batches(5)):
        optimizer.param_groups[0]["lr"] = reference.options["lr"] = 0.01 * step
        train(model, optimizer, [(x, labels)])
        reference.step((x, cross_entropy(labels)))
    assert_close(model, reference.model)


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


def test_add_param_group_before_training():
    model = mlp()
    own = {"lr": 0.01, "damping": 0.5, "weight_decay": 0.1}
    reference = ReferenceTHOR(model, groups={"4.weight": own, "4.bias": own}, update_interval=2)
    optimizer = THOR([*model[0].parameters(), *model[2].parameters()], model=model, update_interval=2)
    optimizer.add_param_group({"params": list(model[4].parameters()), **own})
    for x, labels in batches(5):
        train(model, optimizer, [(x, labels)])
        reference.step((x, cross_entropy(labels)))
    assert_close(model, reference.model)


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
    cross_entropy(labels)(twin(x)).backward()
    other.step()
    assert_close(model, twin, rtol=1e-10, atol=1e-12)


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
