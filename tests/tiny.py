"""Small models and data, by name, for the tests of the optimizer and of the curvature."""

import copy
import warnings
from collections.abc import Mapping

import torch
from torch import nn

from torch_thor.capture.hooks import ModuleCalls

# options of one convolution from 4 channels to 6, and the size of its input
UNEVEN = {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (1, 2)}
CIRCULAR = {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular", "stride": 2}
APART = {"kernel_size": 2, "groups": 2, "stride": 2, "dilation": 2, "bias": False}
CONVOLUTIONS = {
    "plain": ({"kernel_size": 3}, (5, 5)),
    "pointwise": ({"kernel_size": 1}, (3, 2)),
    "stride": ({"kernel_size": 3, "stride": 2, "padding": 1}, (6, 5)),
    "uneven": (UNEVEN, (5, 7)),
    "rows_left_over": ({"kernel_size": 2, "stride": 3}, (6, 7)),
    "dilation": ({"kernel_size": 3, "dilation": 2, "padding": 2}, (5, 6)),
    "same": ({"kernel_size": (3, 5), "padding": "same"}, (4, 5)),
    "circular": (CIRCULAR, (5, 4)),
    "groups": ({"kernel_size": 3, "groups": 2, "padding": 1}, (4, 3)),
    "groups_strided": (APART, (7, 5)),
    "depthwise": ({"kernel_size": 3, "groups": 4, "padding": 1}, (4, 3)),
    "whole_image": ({"kernel_size": (4, 3)}, (4, 3)),
}


def conv_model(name, batch=3):
    """(a float64 model with the named convolution in the middle, its input)."""
    options, size = CONVOLUTIONS[name]
    outputs = 8 if options.get("groups") == 4 else 6
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1),
        nn.Tanh(),
        nn.Conv2d(4, outputs, **options),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ).double()
    x = torch.randn(batch, 2, *size, dtype=torch.float64)
    model(x)  # gives the last layer its size
    return model, x


def mlp(*, bias=True, dtype=torch.float64):
    """5 → 7 → 6 → 3."""
    return nn.Sequential(
        nn.Linear(5, 7, bias=bias),
        nn.Tanh(),
        nn.Linear(7, 6, bias=bias),
        nn.Tanh(),
        nn.Linear(6, 3, bias=bias),
    ).to(dtype)


def batches(count, size=8, features=5, classes=3, dtype=torch.float64):
    """`count` batches (x, labels) of a fixed stream of its own."""
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(size, features, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def as_list(value):
    """Factors come as one tensor, or as a list with a tensor for each group."""
    return list(value) if isinstance(value, list | tuple) else [value]


def cross_entropy(labels):
    """A loss that needs only the output, whose classes are the last dimension."""

    def loss(output):
        return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))

    return loss


def twins(make, build=mlp, **options):
    """(a model, its optimizer, another model with the same weights, its optimizer)."""
    model = build()
    twin = copy.deepcopy(model)
    return model, make(model, **options), twin, make(twin, **options)


def backward(model, batch):
    """The pass of the ordinary loop; returns the loss."""
    x, labels = batch
    loss = cross_entropy(labels)(model(x))
    loss.backward()
    return loss


def train(model, optimizer, stream):
    """The ordinary loop over (x, labels)."""
    for batch in stream:
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()


def told(function, *args):
    """The messages of all RuntimeWarnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def weights(model):
    """Copies of all parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(left, right, where="it"):
    """Two trees of mappings, sequences, tensors and plain values are identical, to the last bit."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), where
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), f"{where} differs by {largest_difference(left, right)}"
    elif isinstance(left, Mapping):
        assert isinstance(right, Mapping), where
        assert left.keys() == right.keys(), where
        for key, value in left.items():
            assert_same(value, right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert type(left) is type(right), where
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert type(left) is type(right), where
        assert left == right, where


def largest_difference(left, right):
    """What a failed comparison of two tensors says."""
    if left.shape != right.shape:
        return f"its shape: {tuple(left.shape)} and {tuple(right.shape)}"
    return (left.double() - right.double()).abs().max().item()


def listeners():
    """The module calls that some optimizer handles."""
    hooks = torch.nn.modules.module._global_forward_pre_hooks.values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return [owner for owner in owners if isinstance(owner, ModuleCalls)]


def leave_no_listeners(but=None):
    """Remove all hooks, also those that other tests have left; an optimizer may keep its own."""
    for listener in listeners():
        if but is None or listener is not but._curvature.capture._calls:
            listener.close()


def listened_to(model):
    """Names of the modules whose calls some optimizer hears."""
    heard = {key for listener in listeners() for key in listener._handlers}
    return {name for name, module in model.named_modules() if id(module) in heard}
