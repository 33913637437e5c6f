"""What torch and its ecosystem expect of any optimizer."""

import inspect
import warnings

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


def test_zero_grad_to_zero():
    model, optimizer, twin, other = twins(update_interval=1)
    for batch in batches(3):
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    train(twin, other, batches(3))
    assert_same(weights(model), weights(twin))


def test_model_zero_grad():
    """`model.zero_grad()` is as common as the optimizer's."""
    model, optimizer, twin, other = twins(update_interval=2)
    for batch in batches(5):
        backward(model, (10 * batch[0], batch[1]))
        model.zero_grad()
        backward(model, batch)
        optimizer.step()
        model.zero_grad()
    train(twin, other, batches(5))
    assert_same(weights(model), weights(twin))


# ------------------------------------------------------------------------------------------- closure


def test_closure():
    """By position and by name, also under no_grad; without one, step returns None."""
    model, optimizer, twin, other = twins(update_interval=2)
    for i, batch in enumerate(batches(4)):

        def closure(batch=batch):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            return backward(model, batch)

        with torch.set_grad_enabled(i % 2 == 0):
            loss = optimizer.step(closure) if i % 2 else optimizer.step(closure=closure)
        assert torch.equal(loss, backward(twin, batch))
        assert other.step() is None
        other.zero_grad()
    assert_same(weights(model), weights(twin))


# --------------------------------------------------------------------------------------------- hooks


def test_step_hooks_run_around_the_step():
    model = mlp()
    optimizer = THOR(model)
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(("before", weights(model))))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(("after", weights(model))))
    before = weights(model)
    train(model, optimizer, batches(1))
    assert [name for name, _ in seen] == ["before", "after"]
    assert_same(seen[0][1], before)
    assert_same(seen[1][1], weights(model))


def test_step_can_be_patched_on_the_instance():
    """Schedulers wrap `optimizer.step`; so do profilers."""
    model, optimizer, twin, other = twins()
    original, calls = optimizer.step, []

    def wrapped(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    optimizer.step = wrapped
    train(model, optimizer, batches(3))
    train(twin, other, batches(3))
    assert len(calls) == 3
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
    reference = ReferenceTHOR(model, update_interval=3)
    optimizer = THOR(model, update_interval=3)
    for step, (x, labels) in enumerate(batches(5)):
        lr = 0.01 * step
        optimizer.param_groups[0]["lr"] = reference.options["lr"] = lr
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
    model = mlp()
    options = {"update_interval": 1, "trace_thresholds": (0.0, 0.0)}
    optimizer = THOR([*model[0].parameters(), *model[2].parameters()], model=model, **options)
    stream = batches(6)
    train(model, optimizer, stream[:3])
    before = model[4].weight.detach().clone()
    for parameter in model.parameters():  # the untrained layer has gathered gradients that no one dropped
        parameter.grad = None
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.01})
    refreshes = optimizer.curvature["0"].refreshes
    train(model, optimizer, stream[3:])
    assert optimizer.curvature["0"].refreshes == refreshes + 3
    assert optimizer.curvature["4"].refreshes == 3
    assert not torch.equal(model[4].weight, before)


def test_accelerate():
    """The wrapper of Accelerate around model, optimizer and scheduler."""
    model, optimizer, twin, other = twins(update_interval=2)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches(4):
        x, labels = batch
        accelerator.backward(cross_entropy(labels)(wrapped(x)))
        optimizer.step()
        optimizer.zero_grad()
    train(twin, other, batches(4))
    assert_same(weights(model), weights(twin))


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


@pytest.mark.parametrize("probe", [by_input, by_parameters, by_some_parameters, functionally, example_by_example])
def test_gradients_that_train_nothing_are_no_statistics(probe):
    """What fills no `.grad` leaves no trace, and works as without THOR, on a refresh step too."""
    model, optimizer, twin, other = twins(update_interval=2)
    for x, labels in batches(3):
        probe(model, 10 * x, labels)
        train(model, optimizer, [(x, labels)])
        train(twin, other, [(x, labels)])
    assert_same(weights(model), weights(twin))
    assert optimizer.curvature["0"].rows_per_term == 1


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


def test_layer_called_by_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            return self.linear(input=x)

    model = Keyword().double()
    optimizer = THOR(model)
    train(model, optimizer, batches(1))
    assert optimizer.curvature["linear"].refreshes == 1
