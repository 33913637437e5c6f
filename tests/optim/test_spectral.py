"""The scale-free step against a slow float64 retelling of it, and what must not change it."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tiny import assert_same_bits, batches, conv_model, cross_entropy, mlp, train, weights
from torch_thor import THOR
from torch_thor.optim.spectral import ADAMW_SHARE, orthogonalise, with_norm

OPTIONS = {"lr": 0.05, "damping": 0.2, "update_interval": 2, "factor_decay": 0.3, "weight_decay": 0.4}


def inverse_fourth_root(matrix, damping):
    values, vectors = np.linalg.eigh(matrix + damping * np.trace(matrix) / len(matrix) * np.eye(len(matrix)))
    return (vectors * values**-0.25) @ vectors.T


def newton_schulz(matrix):
    """Muon's quintic on the singular values themselves, which is all that it changes."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


class Reference:
    """The weights of linear layers; biases are left to torch's AdamW."""

    def __init__(self, model, *, momentum=0.8, nesterov=True):
        self.layers = [m for m in model if isinstance(m, nn.Linear)]
        self.momentum, self.nesterov, self.step_number = momentum, nesterov, 0
        self.factors, self.buffers = {}, {}

    def step(self, rows):
        """`rows`: of each layer, its input and the gradient of one loss term by its output."""
        for i, layer in enumerate(self.layers):
            a, g = rows[i]
            grad, weight = layer.weight.grad.numpy(), layer.weight.detach().numpy()
            if self.step_number % OPTIONS["update_interval"] == 0:
                fresh = (a.T @ a / len(a), g.T @ g / len(g))
                old = self.factors.get(i, fresh)
                decay = OPTIONS["factor_decay"]
                self.factors[i] = tuple(decay * o + (1 - decay) * f for o, f in zip(old, fresh, strict=True))
                self.roots = getattr(self, "roots", {})
                self.roots[i] = [inverse_fourth_root(f, OPTIONS["damping"]) for f in self.factors[i]]
            v = self.buffers[i] = self.momentum * self.buffers.get(i, 0.0) + grad
            u = grad + self.momentum * v if self.nesterov else v
            a_root, g_root = self.roots[i]
            d = newton_schulz(g_root @ u @ a_root)
            outputs, inputs = d.shape
            d *= math.sqrt(min(outputs, inputs)) * math.sqrt(max(1, outputs / inputs)) / np.linalg.norm(d)
            weight *= 1 - OPTIONS["lr"] * OPTIONS["weight_decay"]
            weight -= OPTIONS["lr"] * d
        self.step_number += 1


def rows_of(model, x, labels):
    """Input and output gradient of each linear layer, and gradients in .grad."""
    seen = []

    def hook(module, args, output):
        output.retain_grad()
        seen.append((args[0].detach(), output))

    handles = [m.register_forward_hook(hook) for m in model if isinstance(m, nn.Linear)]
    cross_entropy(labels)(model(x)).backward()
    for handle in handles:
        handle.remove()
    return [(a.numpy(), len(x) * output.grad.numpy()) for a, output in seen]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.8, True), (0.95, True), (0.8, False), (0.0, False)])
def test_five_steps_are_those_of_the_reference(momentum, nesterov):
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    optimizer = THOR(
        model,
        scaling="spectral",
        momentum=momentum,
        nesterov=nesterov,
        trace_thresholds=(0, 0),
        decay_filter=lambda name, parameter: parameter.dim() > 1,
        **OPTIONS,
    )
    reference = Reference(twin, momentum=momentum, nesterov=nesterov)
    adamw = torch.optim.AdamW(
        [m.bias for m in reference.layers], lr=ADAMW_SHARE * OPTIONS["lr"], betas=(0.9, 0.95), weight_decay=0.0
    )
    for x, labels in batches(5):
        train(model, optimizer, [(x, labels)])
        rows = rows_of(twin, x, labels)
        reference.step(rows)
        adamw.step()
        twin.zero_grad()
        for name, value in weights(model).items():
            torch.testing.assert_close(value, weights(twin)[name], rtol=1e-8, atol=1e-10, msg=name)


def test_blocks_keep_to_themselves():
    """split_dim cuts the roots; with blocks as large as the factors nothing is cut."""
    results = []
    for split_dim in (2, 7, None):
        torch.manual_seed(0)
        model = mlp()
        train(model, THOR(model, scaling="spectral", split_dim=split_dim), batches(3))
        results.append(weights(model))
    assert_same_bits(results[1], results[2])
    assert not torch.equal(results[0]["0.weight"], results[1]["0.weight"])


@pytest.mark.parametrize("scale", [1e-6, 1e5])
def test_scale_of_the_loss_does_not_matter(scale):
    """Ten steps of the same directions, whatever the loss is multiplied with (AdamW's epsilon aside)."""
    plain, scaled = mlp(bias=False), mlp(bias=False)
    scaled.load_state_dict(plain.state_dict())
    one, two = (THOR(model, scaling="spectral", update_interval=2) for model in (plain, scaled))
    for x, labels in batches(10):
        train(plain, one, [(x, labels)])
        (scale * cross_entropy(labels)(scaled(x))).backward()
        two.step()
        two.zero_grad()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(scaled)[name], value, rtol=1e-8, atol=1e-10)
    # the trace rule sees the same changes too: an absolute damping would drown those of a small loss
    assert [c.refreshes for c in two.curvature.values()] == [c.refreshes for c in one.curvature.values()] == [5, 5, 5]


@pytest.mark.parametrize("name", ["groups", "groups_strided", "depthwise", "plain", "whole_image"])
def test_length_of_the_first_step(name):
    """Each group of a convolution is a matrix of its own: ‖ΔW‖_F = lr √min(o, i) √max(1, o / i)."""
    model, x = conv_model(name)
    before = weights(model)
    optimizer = THOR(model, lr=0.1, scaling="spectral")
    cross_entropy(torch.tensor([0, 1, 2]))(model(x)).backward()
    optimizer.step()
    conv = model[2]
    change = (conv.weight.detach() - before["2.weight"]).unflatten(0, (conv.groups, -1)).flatten(2)
    _, outputs, inputs = change.shape
    expected = 0.1 * math.sqrt(min(outputs, inputs)) * math.sqrt(max(1, outputs / inputs))
    torch.testing.assert_close(change.norm(dim=(1, 2)), torch.full((conv.groups,), expected, dtype=torch.float64))


def test_tall_kernel_in_channels_last():
    """Two groups of 16 outputs and 9 inputs: the transposed iteration, on a weight that is no matrix in memory."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 32, 3, bias=False, groups=2), nn.Flatten(), nn.Linear(32, 2)).double()
        model = model.to(memory_format=layout)
        optimizer = THOR(model, scaling="spectral")
        torch.manual_seed(1)
        for _ in range(3):
            cross_entropy(torch.tensor([0, 1]))(model(torch.randn(2, 2, 3, 3).double())).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model[0].weight.detach().contiguous())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_singular_values_come_near_each_other():
    left, _, right = np.linalg.svd(np.random.default_rng(0).normal(size=(6, 4)), full_matrices=False)
    matrix = torch.from_numpy((left * np.array([1.0, 0.5, 0.2, 0.05])) @ right)
    found = np.linalg.svd(orthogonalise(matrix[None])[0].numpy(), compute_uv=False)
    assert found.min() > 0.6
    assert found.max() < 1.3


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_scales_whose_squares_leave_float32(size):
    matrix = torch.full((1, 3, 2), size)
    assert with_norm(matrix, 5.0).norm().item() == pytest.approx(5.0 if size else 0.0)
    assert orthogonalise(matrix).isfinite().all()


def test_layer_without_gradient_is_left_where_it_is():
    """Zeros have no direction: no NaN, and no step."""
    model = mlp()
    with torch.no_grad():
        model[4].weight.zero_()  # so that no gradient reaches the layers before it
    before = weights(model)
    train(model, THOR(model, scaling="spectral"), batches(1))
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[4].weight, before["4.weight"])


@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_no_matrix_is_left_to_adamw(sparse):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm, self.head = nn.Embedding(7, 5, sparse=sparse), nn.LayerNorm(5), nn.Linear(5, 3)
            self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex128))

        def forward(self, x):
            return self.head(self.norm(self.tokens(x))) + self.phase.abs()

    model = Model()
    for module in (model.tokens, model.norm, model.head):
        module.double()
    twin = copy.deepcopy(model)
    optimizer = THOR(model, lr=0.1, scaling="spectral")
    rest = [p for n, p in twin.named_parameters() if n != "head.weight"]
    adamw = torch.optim.AdamW(rest, lr=ADAMW_SHARE * 0.1, betas=(0.9, 0.95), weight_decay=0.0)
    assert {c.name for c in optimizer.coverage() if c.preconditioned} == {"head.weight"}
    assert "AdamW: no matrix" in repr(optimizer)
    for _ in range(3):
        with torch.no_grad():
            twin.head.weight.copy_(model.head.weight)
        x, labels = torch.randint(7, (8,)), torch.randint(3, (8,))
        for m, o in ((model, optimizer), (twin, adamw)):
            cross_entropy(labels)(m(x)).backward()
            if m is twin and sparse:
                m.tokens.weight.grad = m.tokens.weight.grad.to_dense()
            o.step()
            m.zero_grad()
        for name, value in weights(model).items():
            if name != "head.weight":
                torch.testing.assert_close(value, weights(twin)[name], msg=name)


def test_defaults_go_with_the_scaling():
    wanted = {
        None: (0.05, 0.03, 0.9, False, 100, 0.0),
        "spectral": (0.08, 0.1, 0.8, True, 10, 0.5),
    }
    keys = ("lr", "damping", "momentum", "nesterov", "update_interval", "factor_decay")
    for scaling, values in wanted.items():
        group = THOR(mlp(), scaling=scaling).param_groups[0]
        assert tuple(group[key] for key in keys) == values
    assert THOR(mlp(), scaling="spectral", lr=0.3).param_groups[0]["lr"] == 0.3
    assert THOR(mlp(), scaling="spectral", momentum=0.0).param_groups[0]["nesterov"] is False


def test_clipping_a_step_of_fixed_length_is_refused():
    with pytest.raises(ValueError, match="kl_clip"):
        THOR(mlp(), scaling="spectral", kl_clip=1e-3)


def test_groups_have_the_scaling_of_their_optimizer():
    model = mlp()
    groups = [{"params": model[0].parameters(), "scaling": "spectral"}, {"params": model[2].parameters()}]
    with pytest.raises(ValueError, match="scaling"):
        THOR(groups, model=model)


def test_state_of_the_other_scaling_is_refused():
    model = mlp()
    plain = THOR(model)
    train(model, plain, batches(2))
    with pytest.raises(ValueError, match="scaling=None"):
        THOR(mlp(), scaling="spectral").load_state_dict(plain.state_dict())


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_resume_is_never_having_stopped(stop):
    stream = batches(8)
    model = mlp()
    optimizer = THOR(model, scaling="spectral", **OPTIONS)
    train(model, optimizer, stream[:stop])
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    train(model, optimizer, stream[stop:])
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other = mlp()
    other.load_state_dict(loaded["model"])
    resumed = THOR(other, scaling="spectral", **OPTIONS)
    resumed.load_state_dict(loaded["optimizer"])
    train(other, resumed, stream[stop:])
    assert_same_bits(weights(model), weights(other))


def test_distributed_checkpoint_of_a_fresh_optimizer():
    model = mlp()
    optimizer = THOR(model, scaling="spectral", **OPTIONS)
    before = weights(model)
    empty = get_optimizer_state_dict(model, optimizer)
    assert_same_bits(before, weights(model))
    train(model, optimizer, batches(3))
    full = get_optimizer_state_dict(model, optimizer)
    assert full["state"].keys() == empty["state"].keys()
    for name, entry in full["state"].items():
        assert entry.keys() == empty["state"][name].keys()
    other = mlp()
    other.load_state_dict(model.state_dict())
    resumed = THOR(other, scaling="spectral", **OPTIONS)
    set_optimizer_state_dict(other, resumed, full)
    train(model, optimizer, batches(5))
    train(other, resumed, batches(5))
    assert_same_bits(weights(model), weights(other))


def test_bfloat16_parameters_have_float32_state():
    model = mlp(dtype=torch.bfloat16)
    optimizer = THOR(model, scaling="spectral")
    train(model, optimizer, batches(3, dtype=torch.bfloat16))
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        kept = optimizer.state[parameter]
        assert all(v.dtype == torch.float32 for v in kept.values() if isinstance(v, torch.Tensor)), name
