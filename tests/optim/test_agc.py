"""Adaptive gradient clipping by hand and by loops; AGCSGD is SGD with the clipped gradients."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from reference.agc import clipped, gradients_of, output_of_each_number, rows_of_dim_0
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import AGCSGD, adaptive_clip_grad_
from torch_thor.optim import agc

INF = float("inf")


class NoWaiting(TorchDispatchMode):
    """Fails if a number is read from a tensor, because the host would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), func
        return func(*args, **(kwargs or {}))


def parameter(values, gradient, dtype=torch.float64):
    p = nn.Parameter(torch.as_tensor(values, dtype=dtype))
    p.grad = torch.as_tensor(gradient, dtype=dtype)
    return p


def test_hand_values():
    """Norms of W: 5, 0 (ε), 13, 4. Limits 0.5, 0.0001, 1.3, 0.4; norms of G: 1, 5, 1.29, 0.4."""
    matrix = parameter([[3, 4], [0, 0], [5, 12], [4, 0]], [[0.6, 0.8], [3, 4], [0, 1.29], [0, 0.4]])
    found = adaptive_clip_grad_(matrix, 0.1, 1e-3)
    expected = torch.tensor(
        [[0.3, 0.4], [0.00006, 0.00008], [0, 1.29], [0, 0.4]], dtype=torch.float64
    )
    torch.testing.assert_close(matrix.grad, expected, rtol=1e-14, atol=0)
    assert (int(found.clipped), found.units, float(found.share)) == (2, 4, 0.5)
    defaults = parameter([[0], [1]], [[1], [1]])  # the values of the paper
    found = adaptive_clip_grad_(q for q in (nn.Parameter(torch.ones(2, 2)), defaults))
    assert defaults.grad.flatten().tolist() == pytest.approx([1e-5, 1e-2])
    assert (int(found.clipped), found.units) == (2, 2)
    nothing = adaptive_clip_grad_([])
    assert (int(nothing.clipped), nothing.units, float(nothing.share)) == (0, 0, 0.0)


# a layer, and the size of an input by which its units are found; None: they lie along dim 0
LAYERS = [
    (lambda: nn.Linear(6, 4), (1, 6)),
    (lambda: nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), (1, 2, 2, 2)),
    (lambda: nn.Conv1d(4, 6, 2, groups=2), (1, 4, 4)),
    (lambda: nn.ConvTranspose1d(4, 6, 2, groups=2), (1, 4, 3)),
    (lambda: Conv1D(5, 3), (1, 3)),
    (lambda: nn.Embedding(3, 6), None),
    (lambda: nn.LayerNorm(6), None),
    (lambda: nn.ParameterList(map(torch.randn, [(1, 1, 6), (5, 1, 1), ()])), None),
    (lambda: nn.ParameterList([torch.randn(3, 4, dtype=torch.cdouble)]), None),
]


@pytest.mark.parametrize(("foreach", "at_a_time"), [(None, 50), (None, 10**6), (False, 50)])
def test_units_are_the_outputs_of_every_kind_of_layer(foreach, at_a_time, monkeypatch):
    """Some units of each parameter are clipped, and not all."""
    monkeypatch.setattr(agc, "_NUMBERS_AT_A_TIME", at_a_time)
    model, expected, total, every = nn.ModuleList(), {}, 0, 0
    for make, size in LAYERS:
        layer = make()
        model.append(layer if next(layer.parameters()).is_complex() else layer.double())
        for name, p in layer.named_parameters():
            units = rows_of_dim_0(p.shape)
            if size is not None and name == "weight":
                units = output_of_each_number(layer, size)
            ratios = torch.rand(units.max() + 1, dtype=torch.float64)
            # the first unit is clipped, the second is not
            ratios[:2] = torch.tensor([0.8, 0.15])[: len(ratios)]
            noise = 1 + torch.rand_like(p.real)
            with torch.no_grad():
                p.grad = p.add_(0.1) * (ratios[units.copy()] * noise).to(p.dtype)
            expected[p], count = clipped(p.detach().numpy(), p.grad.numpy(), units, 0.4, 1e-3)
            total, every = total + count, every + len(ratios)
            assert 0 < count < max(len(ratios), 2)
    with NoWaiting():
        found = adaptive_clip_grad_(model, 0.4, exclude=(), foreach=foreach)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(
            p.grad.numpy(), expected[p], rtol=1e-12, atol=1e-15, err_msg=name
        )
    assert (int(found.clipped), found.units) == (total, every)


def test_the_last_linear_layer_or_what_exclude_names_is_not_clipped():
    linear = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    for options, expected in (
        ({}, ["2.weight", "2.bias"]),
        ({"exclude": ()}, []),
        ({"exclude": ["*.bias", "1"]}, ["0.bias", "1.weight", "1.bias", "2.bias"]),
    ):
        gradients_of(linear, scale=100.0)
        before = {name: p.grad.clone() for name, p in linear.named_parameters()}
        adaptive_clip_grad_(linear, 1e-6, **options)
        kept = [name for name, p in linear.named_parameters() if p.grad.equal(before[name])]
        assert kept == expected
    with pytest.raises(TypeError, match=r"exclude='0' without a model.*pass the model"):
        adaptive_clip_grad_(linear.parameters(), exclude="0")


def test_norms_are_exact_in_every_dtype():
    """The sum of the squares, 2.7e7, overflows in float16 and would stall in bfloat16."""
    values, gradient = torch.full((1, 300), 300), torch.full((1, 300), 30)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        p = parameter(values, gradient, dtype)
        pointer = p.grad.data_ptr()
        adaptive_clip_grad_(p, 0.01)
        assert (p.grad.data_ptr(), p.grad.dtype) == (pointer, dtype)
        torch.testing.assert_close(p.grad, torch.full_like(p, 3))


def test_sparse_gradients_and_wrong_options_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"\(5, 3\).*sparse_coo.*sparse=False"):
        adaptive_clip_grad_(model)
    for option, value in (("clip_factor", "0.1"), ("eps", 0.0)):
        with pytest.raises(ValueError, match=rf"^{option}={value!r}: {option} must be a .* > 0$"):
            adaptive_clip_grad_([], **{option: value})


# ---- AGCSGD --------------------------------------------------------------------------------------

SETTINGS = {
    "plain": {},
    "dampening": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
}
FIRST = {"momentum": 0.9, "dampening": 0.5, "clip_factor": INF, "dampen_first": True}
# W = (3, 4), lr = 0.5, μ = 0.9, τ = 0.5: options, gradients, W after each step
BY_HAND = {
    # v starts with 0 + (1, 0), and goes on with (0.9, 0) + (0, 2)
    "momentum": (FIRST, (2, 0), (0, 4), (2.5, 4), (2.05, 3)),
    # the same v; W less half of (2, 0) + 0.9 (1, 0), then less half of (0, 4) + 0.9 (0.9, 2)
    "nesterov": (FIRST | {"nesterov": True}, (2, 0), (0, 4), (1.55, 4), (1.145, 1.1)),
}  # fmt: skip


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", BY_HAND)
def test_two_steps_with_a_dampened_first_gradient_by_hand(name, foreach):
    options, *steps = BY_HAND[name]
    p = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    optimizer = AGCSGD([p], lr=0.5, exclude=(), foreach=foreach, **options)
    for gradient, expected in zip(steps[:2], steps[2:], strict=True):
        p.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert p.tolist() == [pytest.approx(expected, rel=1e-13)]


def network(dtype):
    torch.manual_seed(3)
    layers = nn.Conv1d(1, 4, 2), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 6), nn.Linear(6, 3)
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize(
    ("clip_factor", "dtype"), [(INF, torch.float32), (INF, torch.bfloat16), (0.2, torch.float64)]
)
def test_steps_are_steps_of_sgd_with_clipped_gradients(clip_factor, dtype, foreach, name):
    model, twin = network(dtype), network(dtype)
    optimizer = AGCSGD(model, lr=0.05, clip_factor=clip_factor, foreach=foreach, **SETTINGS[name])
    other = torch.optim.SGD(twin.parameters(), lr=0.05, foreach=foreach, **SETTINGS[name])
    for x, labels in batches(5, dtype=dtype):
        train(model, optimizer, [(x[:, None], labels)])
        cross_entropy(labels)(twin(x[:, None])).backward()
        found = adaptive_clip_grad_(twin, clip_factor)
        assert optimizer.clip_statistics == found
        assert (0 < found.share < 1) == (clip_factor < INF)
        other.step()
        other.zero_grad()
        assert_same(weights(model), weights(twin))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(optimizer.state[p], other.state[q])


def test_a_checkpoint_of_sgd_goes_on():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    train(model, sgd, batches(2))
    twin = copy.deepcopy(model)
    optimizer = AGCSGD(twin, lr=0.1, clip_factor=INF, eps=0.5)
    optimizer.load_state_dict(sgd.state_dict())
    expected = {"lr": 0.3, "momentum": 0.8, "clip_factor": INF, "eps": 0.5}
    assert expected.items() <= optimizer.param_groups[0].items()
    train(model, sgd, batches(4)[2:])
    train(twin, optimizer, batches(4)[2:])
    assert_same(weights(model), weights(twin))


def test_print_tells_what_is_not_clipped():
    head = mlp()
    for optimizer, said in (
        (AGCSGD(head), "not clipped is the last nn.Linear, '4': 4.weight, 4.bias"),
        (AGCSGD(nn.Sequential(nn.Conv2d(1, 2, 1))), "all are clipped: Sequential has no nn.Linear"),
        (AGCSGD(head, exclude="0.*"), "not clipped, as exclude= says: 0.weight, 0.bias"),
    ):
        assert repr(optimizer).splitlines()[-1].startswith(said)
        assert all(name in said for name in optimizer.excluded)
    with pytest.raises(TypeError, match=r"must know the model.*model=model.*exclude=\(\)"):
        AGCSGD(head.parameters())
