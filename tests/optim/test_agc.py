"""Adaptive gradient clipping: by hand and by explicit loops."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from reference.agc import clipped, gradients_of, output_of_each_number, rows_of_dim_0
from torch_thor import adaptive_clip_grad_
from torch_thor.optim import agc

INF = float("inf")


class NoWaiting(TorchDispatchMode):
    """Fails on whatever reads a number off a tensor, for which a GPU would make the host wait."""

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
    defaults = parameter([[0], [1]], [[1], [1]])
    hollow = [parameter(torch.ones(shape), torch.ones(shape)) for shape in ((0, 4), (3, 0))]
    # the paper's
    found = adaptive_clip_grad_(q for q in (nn.Parameter(torch.ones(2, 2)), *hollow, defaults))
    assert defaults.grad.flatten().tolist() == pytest.approx([1e-5, 1e-2])
    assert (int(found.clipped), found.units) == (2, 2)
    nothing = adaptive_clip_grad_([])
    assert (int(nothing.clipped), nothing.units, float(nothing.share)) == (0, 0, 0.0)


class Louder(nn.ConvTranspose2d):
    """It overrides forward, so that it has no kind."""

    def forward(self, x):
        return 2 * super().forward(x)


# a layer whose units are found by trying, with the size of its input; or one that is divided along
# dim 0
LAYERS = [
    (lambda: nn.Linear(6, 4), (1, 6)),
    (lambda: nn.Conv2d(3, 4, (2, 3), padding=1), (1, 3, 4, 4)),
    (lambda: nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), (1, 2, 2, 2)),
    (lambda: nn.Conv1d(4, 6, 2, groups=2), (1, 4, 4)),
    (lambda: nn.ConvTranspose2d(3, 4, 2), (1, 3, 2, 2)),
    (lambda: nn.ConvTranspose1d(4, 6, 2, groups=2), (1, 4, 3)),
    (lambda: Louder(4, 6, 2, groups=2), (1, 4, 2, 2)),
    (lambda: Conv1D(5, 3), (1, 3)),
    (lambda: nn.Embedding(3, 6), None),
    (lambda: nn.LayerNorm(6), None),
    (lambda: nn.ParameterList(map(torch.randn, [(1, 1, 6), (5, 1, 1), ()])), None),
    (lambda: nn.ParameterList([torch.randn(3, 4, dtype=torch.cdouble)]), None),
]


@pytest.mark.parametrize("at_a_time", [1, 50, 10**6])
@pytest.mark.parametrize("foreach", [None, False])
def test_units_are_the_outputs_of_every_kind_of_layer(foreach, at_a_time, monkeypatch):
    """In batches of one, of a few and of all; of each parameter some units are clipped, not all."""
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


def test_what_is_left_alone():
    linear = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    for model, options, expected in (
        (nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)), {}, []),
        (linear, {}, ["2.weight", "2.bias"]),
        (linear, {"exclude": ()}, []),
        (linear, {"exclude": ["*.bias", "1"]}, ["0.bias", "1.weight", "1.bias", "2.bias"]),
    ):
        gradients_of(model, scale=100.0)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        adaptive_clip_grad_(model, 1e-6, **options)
        assert [
            name for name, p in model.named_parameters() if torch.equal(p.grad, before[name])
        ] == expected
    with pytest.raises(TypeError, match=r"exclude='0' without a model.*pass the model"):
        adaptive_clip_grad_(linear.parameters(), exclude="0")


def test_norms_of_every_dtype():
    """The sum of the squares, 2.7e7, is beyond float16; in bfloat16 it would have stalled."""
    values, gradient = torch.full((1, 300), 300), torch.full((1, 300), 30)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        p = parameter(values, gradient, dtype)
        pointer = p.grad.data_ptr()
        adaptive_clip_grad_(p, 0.01)
        assert (p.grad.data_ptr(), p.grad.dtype) == (pointer, dtype)
        torch.testing.assert_close(p.grad, torch.full_like(p, 3))


def test_inf_clips_nothing_to_the_bit():
    gradient = [[0.0, -0.0, 1e-45], [INF, 1.0, 2.0], [float("nan"), 1.0, 2.0], [1e38, 1e38, 1e38]]
    p = parameter(torch.randn(4, 3), gradient, torch.float32)
    before = p.grad.clone()
    assert int(adaptive_clip_grad_(p, INF).clipped) == 0
    assert torch.equal(p.grad.view(torch.int32), before.view(torch.int32))


def test_sparse_gradients_and_wrong_options_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"\(5, 3\).*sparse_coo.*sparse=False"):
        adaptive_clip_grad_(model)
    for option, value in (("clip_factor", 0.0), ("clip_factor", "0.1"), ("eps", 0.0)):
        with pytest.raises(ValueError, match=rf"^{option}={value!r}: {option} must be a .* > 0$"):
            adaptive_clip_grad_([], **{option: value})
