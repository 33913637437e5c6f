"""Adaptive gradient clipping: by hand, by explicit loops, beside timm's, and with other optimizers."""

import copy
import math

import numpy as np
import pytest
import timm
import torch
from timm.utils.agc import adaptive_clip_grad as timms
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from reference.agc import clipped, gradients_of, output_of_each_number, rows_of_dim_0
from tiny import assert_same, batches, cross_entropy, mlp, weights
from torch_thor import THOR, ClipStatistics, adaptive_clip_grad_

INF = float("inf")


class NoWaiting(TorchDispatchMode):
    """Fails on whatever reads a number off a tensor, for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select"), func
        return func(*args, **(kwargs or {}))


def parameter(values, gradient):
    p = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    p.grad = torch.tensor(gradient, dtype=torch.float64)
    return p


# ------------------------------------------------------------------------------------------ hand values


def test_hand_values_of_a_matrix():
    """λ = 0.1, norms of W: 5, 0 (ε = 0.001), 13. Limits 0.5, 0.0001, 1.3; norms of G: 1, 5, 1.3 - a little."""
    p = parameter([[3.0, 4.0], [0.0, 0.0], [5.0, 12.0]], [[0.6, 0.8], [3.0, 4.0], [0.0, 1.29]])
    found = adaptive_clip_grad_(p, 0.1, 1e-3)
    expected = [[0.3, 0.4], [0.00006, 0.00008], [0.0, 1.29]]
    torch.testing.assert_close(p.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert (int(found.clipped), found.units) == (2, 3)
    assert float(found.share) == pytest.approx(2 / 3)


def test_a_filter_is_one_unit_and_a_bias_is_one_unit():
    """Filter 0: ‖W‖ = 2, limit 0.2, ‖G‖ = 4. Filter 1: limit 0.6, ‖G‖ = 0.5. Bias: ‖b‖ = 5, limit 0.5, ‖g‖ = 1."""
    weight = parameter(np.array([1.0, 3.0]).reshape(2, 1, 1, 1) * np.ones((2, 1, 2, 2)),
                       np.array([2.0, 0.25]).reshape(2, 1, 1, 1) * np.ones((2, 1, 2, 2)))  # fmt: skip
    bias = parameter([3.0, 4.0], [0.0, 1.0])
    gain = parameter(2.0, -1.0)
    found = adaptive_clip_grad_([weight, bias, gain], 0.1)
    assert weight.grad.flatten(1).tolist() == [pytest.approx([0.1] * 4), [0.25] * 4]
    assert bias.grad.tolist() == pytest.approx([0.0, 0.5])
    assert float(gain.grad) == pytest.approx(-0.2)
    assert (int(found.clipped), found.units) == (3, 4)


def test_a_gradient_at_the_limit_stays():
    p = parameter([[4.0, 0.0]], [[0.0, 1.0]])
    assert int(adaptive_clip_grad_(p, 0.25).clipped) == 0
    assert p.grad.tolist() == [[0.0, 1.0]]


def test_defaults_are_the_papers():
    p = parameter([[0.0], [1.0]], [[1.0], [1.0]])
    adaptive_clip_grad_([p])
    assert p.grad.flatten().tolist() == pytest.approx([1e-5, 1e-2])


# ------------------------------------------------------------------------------------- explicit loops


LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), (1, 3)),
    "one_input": (lambda: nn.Linear(1, 4), (1, 1)),
    "conv": (lambda: nn.Conv2d(3, 4, (2, 3), padding=1), (1, 3, 4, 4)),
    "grouped": (lambda: nn.Conv1d(4, 6, 2, groups=2), (1, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 2), (1, 3, 2, 2)),
    "transposed_grouped": (lambda: nn.ConvTranspose1d(4, 6, 2, groups=2), (1, 4, 3)),
    "transposed_3d": (lambda: nn.ConvTranspose3d(2, 3, 1), (1, 2, 2, 2, 2)),
    "gpt2": (lambda: Conv1D(5, 3), (1, 3)),
}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_units_are_the_outputs_of_every_kind_of_layer(kind, foreach):
    make, size = LAYERS[kind]
    layer = make().double()
    outputs = output_of_each_number(layer, size)
    gradients_of(layer)
    layer.weight.grad[0] *= 30  # so that dim 0 taken for the outputs shows
    weight, gradient = layer.weight.detach().numpy(), layer.weight.grad.numpy().copy()
    for factor in np.geomspace(1e-3, 1e3, 200):  # one that clips some units and not others
        expected, count = clipped(weight, gradient, outputs, factor, 1e-3)
        if 0 < count < outputs.max() + 1:
            break
    assert 0 < count < outputs.max() + 1
    layer.bias.grad = None
    found = adaptive_clip_grad_(layer, factor, exclude=(), foreach=foreach)
    np.testing.assert_allclose(layer.weight.grad.numpy(), expected, rtol=1e-12, atol=1e-15)
    assert (int(found.clipped), found.units) == (count, outputs.max() + 1)


# ----------------------------------------------------------------------------------------------- timm


@pytest.mark.parametrize("name", ["resnet10t", "test_nfnet", "test_vit"])
def test_equals_timms(name):
    model = timm.create_model(name, num_classes=7)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        gradients_of(one, scale=0.05)
    found = adaptive_clip_grad_(list(model.parameters()), 0.02)
    timms(twin.parameters(), 0.02)
    assert 0.1 < float(found.share) < 0.99
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


# ------------------------------------------------------------------------------------- the last layer


def head_of(model, **options):
    """Names of the parameters whose gradients were left as they were."""
    gradients_of(model, scale=100.0)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    adaptive_clip_grad_(model, 1e-6, **options)
    return [name for name, p in model.named_parameters() if torch.equal(p.grad, before[name])]


@pytest.mark.parametrize(("name", "head"), [("resnet10t", "fc"), ("test_nfnet", "head.fc"), ("test_vit", "head")])
def test_the_classifier_of_real_networks_is_left_alone(name, head):
    assert head_of(timm.create_model(name, num_classes=7)) == [f"{head}.weight", f"{head}.bias"]


def test_a_network_without_linear_layers_is_clipped_as_a_whole():
    assert head_of(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1))) == []


def test_exclude_by_name_pattern_module_and_rule():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    assert head_of(model, exclude=()) == []
    assert head_of(model, exclude="0") == ["0.weight", "0.bias"]
    assert head_of(model, exclude=["*.bias", model[1]]) == ["0.bias", "1.weight", "1.bias", "2.bias"]
    assert head_of(model, exclude=model[2]) == ["2.weight", "2.bias"]
    assert head_of(model, exclude=lambda name, p: p.dim() == 1) == ["0.bias", "1.bias", "2.bias"]


def test_exclude_that_finds_nothing_is_an_error():
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"'hed' matches no parameter.*0\.weight"):
        adaptive_clip_grad_(model, exclude=["0", "hed"])
    with pytest.raises(ValueError, match="Linear is not in the model"):
        adaptive_clip_grad_(model, exclude=nn.Linear(2, 3))
    with pytest.raises(TypeError, match="exclude=3: must be a name"):
        adaptive_clip_grad_(model, exclude=3)
    with pytest.raises(TypeError, match="exclude='0' without the model"):
        adaptive_clip_grad_(model.parameters(), exclude="0")


# ---------------------------------------------------------------------------------------------- edges


def test_nothing_waits_for_the_device():
    model = timm.create_model("test_nfnet", num_classes=7)
    gradients_of(model)
    with NoWaiting():
        share = adaptive_clip_grad_(model, 0.01).share
    assert 0 < float(share) < 1
    with pytest.raises(AssertionError), NoWaiting():  # and the guard sees what it is there to see
        float(torch.ones(()))


def test_no_gradient_no_numbers_no_parameters():
    frozen, empty, p = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(0, 4)), parameter([[1.0]], [[1.0]])
    empty.grad = torch.ones(0, 4)
    hollow = nn.Parameter(torch.ones(3, 0))
    hollow.grad = torch.ones(3, 0)
    found = adaptive_clip_grad_(q for q in (frozen, empty, hollow, p))
    assert (int(found.clipped), found.units) == (1, 1)
    assert p.grad.tolist() == [[0.01]]
    nothing = adaptive_clip_grad_([])
    assert (int(nothing.clipped), nothing.units, float(nothing.share)) == (0, 0, 0.0)
    assert isinstance(nothing, ClipStatistics)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_norms_are_float32(dtype):
    """300 numbers of 300: the sum of squares, 2.7e7, is beyond float16; in bfloat16 it would have stalled."""
    p = nn.Parameter(torch.full((1, 300), 300.0, dtype=dtype))
    p.grad = torch.full((1, 300), 30.0, dtype=dtype)
    pointer = p.grad.data_ptr()
    adaptive_clip_grad_(p, 0.01)
    assert (p.grad.dtype, p.grad.data_ptr()) == (dtype, pointer)
    assert torch.equal(p.grad, torch.full((1, 300), 3.0, dtype=dtype))


def test_dtypes_side_by_side():
    wide, narrow = parameter([[1.0, 0.0]], [[1.0, 1.0]]), nn.Parameter(torch.tensor([[1.0, 0.0]]))
    narrow.grad = torch.ones(1, 2)
    adaptive_clip_grad_([wide, narrow], 0.1)
    assert wide.grad.tolist() == [pytest.approx([0.1 / math.sqrt(2)] * 2, rel=1e-14)]
    torch.testing.assert_close(narrow.grad, wide.grad.float())


@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 3, 2)])
def test_complex_numbers_count_by_their_size(shape):
    p = nn.Parameter(torch.randn(shape, dtype=torch.complex128))
    p.grad = torch.randn(shape, dtype=torch.complex128)
    units_of = rows_of_dim_0(shape)
    expected, count = clipped(p.detach().numpy(), p.grad.numpy(), units_of, 0.9, 1e-3)
    found = adaptive_clip_grad_(p, 0.9)
    np.testing.assert_allclose(p.grad.numpy(), expected, rtol=1e-12)
    assert (int(found.clipped), found.units) == (count, units_of.max() + 1)


def test_channels_last_is_kept():
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    gradients_of(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone().contiguous()
        p.grad = p.grad.to(memory_format=torch.channels_last) if p.dim() == 4 else p.grad
    strides = model.weight.grad.stride()
    for one in (model, twin):
        adaptive_clip_grad_(one, 0.01, exclude=())
    assert model.weight.grad.stride() == strides != twin.weight.grad.stride()
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)


def test_inf_clips_nothing_to_the_bit():
    p = nn.Parameter(torch.randn(4, 3))
    p.grad = torch.tensor([[0.0, -0.0, 1e-45], [INF, 1.0, 2.0], [float("nan"), 1.0, 2.0], [1e38, 1e38, 1e38]])
    before = p.grad.clone()
    assert int(adaptive_clip_grad_(p, INF).clipped) == 0
    assert torch.equal(p.grad.view(torch.int32), before.view(torch.int32))


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"\(5, 3\).*sparse_coo.*sparse=False"):
        adaptive_clip_grad_(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip_factor": 0.0}, r"clip_factor=0\.0: clip_factor must be a number > 0; 0\.01 is"),
        ({"clip_factor": -1}, "clip_factor=-1"),
        ({"clip_factor": float("nan")}, "clip_factor=nan"),
        ({"clip_factor": "0.1"}, "clip_factor='0.1'"),
        ({"eps": 0.0}, r"eps=0\.0: eps must be a finite number > 0; 1e-3"),
        ({"eps": INF}, "eps=inf"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(ValueError, match=said):
        adaptive_clip_grad_([], **options)


# ------------------------------------------------------------------------------ with other optimizers


def test_with_adamw():
    """The step is AdamW's on the gradients of the loops; the last layer has its own."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    for x, labels in batches(4):
        cross_entropy(labels)(model(x)).backward()
        adaptive_clip_grad_(model, 0.05)
        cross_entropy(labels)(twin(x)).backward()
        for name, p in twin.named_parameters():
            if not name.startswith("4."):
                units_of = rows_of_dim_0(p.shape)
                p.grad = torch.tensor(clipped(p.detach().numpy(), p.grad.numpy(), units_of, 0.05, 1e-3)[0])
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_with_thor():
    """Factors are those of the unclipped pass; what they precondition is the clipped gradient."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    options = {"lr": 0.1, "momentum": 0.0, "update_interval": 1}
    optimizer, other = THOR(model, **options), THOR(twin, **options)
    [(x, labels)] = batches(1)
    start = weights(model)
    for one in (model, twin):
        cross_entropy(labels)(one(x)).backward()
    assert int(adaptive_clip_grad_(model, 0.01).clipped) > 0
    gradient = model[0].weight.grad.clone()
    assert not torch.equal(gradient, twin[0].weight.grad)
    optimizer.step()
    other.step()
    for ours, theirs in zip(optimizer.curvature["0"].factors(), other.curvature["0"].factors(), strict=True):
        assert torch.equal(ours, theirs)
    A_inverse, G_inverse = optimizer.curvature["0"].inverses()
    torch.testing.assert_close(model[0].weight, start["0.weight"] - 0.1 * G_inverse @ gradient @ A_inverse)


def test_with_a_grad_scaler():
    """After unscale_ it sees true gradients: 2 ** 16 times as large ones would all be clipped."""
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for x, labels in batches(3, dtype=torch.float32):
        scaler.scale(cross_entropy(labels)(model(x))).backward()
        scaler.unscale_(optimizer)
        cross_entropy(labels)(twin(x)).backward()
        for one in (model, twin):
            adaptive_clip_grad_(one, 0.05)
        scaler.step(optimizer)
        scaler.update()
        other.step()
        for each in (optimizer, other):
            each.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_frozen_layers_and_accumulation_are_no_matter():
    model = mlp()
    model[0].requires_grad_(False)
    before = weights(model)
    for x, labels in batches(2):
        cross_entropy(labels)(model(x)).backward()
    found = adaptive_clip_grad_(model, 1e-4)
    assert found.units == 6 + 1
    assert model[0].weight.grad is None
    assert_same(weights(model), before)
