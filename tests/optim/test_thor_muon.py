"""The orthogonalised step against a slow float64 retelling of it, and what must not change it."""

import copy
import math

import numpy as np
import pytest
import torch
from test_state import assert_resumes, by_distributed_checkpoint, keys_of, thor
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tiny import assert_same, batches, conv_model, cross_entropy, mlp, train, weights
from torch_thor import ThorMuon, param_groups

ADAMW_SHARE = 0.2  # of lr, for what is no matrix
RATIO = 0.08  # some steps of the reference are bounded by it, and some are not
OPTIONS = {"lr": 0.05, "damping": 0.2, "update_interval": 2, "factor_decay": 0.3}
DECAY = 0.4


def damped_inverse(factor, damping, size):
    """(M + λ tr(M)/n I)⁻¹ of what is left of M when all between blocks of a size is dropped."""
    shift = damping * np.trace(factor) / len(factor)
    inverse = np.zeros_like(factor)
    for start in range(0, len(factor), size):
        cut = slice(start, start + size)
        inverse[cut, cut] = np.linalg.inv(factor[cut, cut] + shift * np.eye(len(factor[cut])))
    return inverse


def polar_factor(matrix):
    """All singular values 1, but those that are 0 to rounding: the rows of a softmax's gradient add up to zero."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left * (values > 1e-9 * values.max())) @ right


def polar_factors(matrix, size):
    """Those of the blocks along the smaller side: of rows, of a tall matrix of columns."""
    if len(matrix) > matrix.shape[1]:
        return polar_factors(matrix.T, size).T
    return np.concatenate([polar_factor(matrix[start : start + size]) for start in range(0, len(matrix), size)])


class Reference:
    """The weights of linear layers; biases are left to torch's AdamW."""

    def __init__(self, model, *, momentum=0.8, nesterov=True, split_dim=None):
        self.layers = [m for m in model if isinstance(m, nn.Linear)]
        self.momentum, self.nesterov, self.step_number = momentum, nesterov, 0
        self.size = split_dim or 1000
        self.factors, self.buffers, self.inverses, self.bounded = {}, {}, {}, []

    def step(self, inputs):
        """`inputs`: of each layer, the rows of its input."""
        for i, layer in enumerate(self.layers):
            a = inputs[i]
            grad, weight = layer.weight.grad.numpy(), layer.weight.detach().numpy()
            if self.step_number % OPTIONS["update_interval"] == 0:
                fresh, decay = a.T @ a / len(a), OPTIONS["factor_decay"]
                self.factors[i] = decay * self.factors.get(i, fresh) + (1 - decay) * fresh
                self.inverses[i] = damped_inverse(self.factors[i], OPTIONS["damping"], self.size)
            v = self.buffers[i] = self.momentum * self.buffers.get(i, 0.0) + grad
            u = grad + self.momentum * v if self.nesterov else v
            d = polar_factors(u @ self.inverses[i], self.size)
            outputs, inputs_ = d.shape
            weight *= 1 - OPTIONS["lr"] * DECAY
            length = OPTIONS["lr"] * math.sqrt(min(1, 10 / len(self.layers)))
            length *= math.sqrt(min(outputs, inputs_)) * math.sqrt(max(1, outputs / inputs_))
            longest = RATIO * max(np.linalg.norm(weight), 0.03 * math.sqrt(outputs))
            self.bounded.append(length > longest)
            length = min(length, longest)
            weight -= length * d / np.linalg.norm(d)
        self.step_number += 1


def inputs_of(model, x, labels):
    """The input of each linear layer, and gradients in .grad."""
    seen = []
    linear = [m for m in model if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().numpy())) for m in linear]
    cross_entropy(labels)(model(x)).backward()
    for handle in handles:
        handle.remove()
    return seen


def assert_steps_of_the_reference(model, stream, *, momentum=0.8, nesterov=True, split_dim=128):
    twin = copy.deepcopy(model)
    options = {"momentum": momentum, "nesterov": nesterov, "split_dim": split_dim, "max_update_ratio": RATIO}
    optimizer = ThorMuon(param_groups(model, weight_decay=DECAY), model=model, **OPTIONS, **options)
    reference = Reference(twin, momentum=momentum, nesterov=nesterov, split_dim=split_dim)
    adamw = torch.optim.AdamW(
        [m.bias for m in reference.layers], lr=ADAMW_SHARE * OPTIONS["lr"], betas=(0.9, 0.95), weight_decay=0.0
    )
    for x, labels in stream:
        train(model, optimizer, [(x, labels)])
        reference.step(inputs_of(twin, x, labels))
        adamw.step()
        twin.zero_grad()
        for name, value in weights(model).items():
            torch.testing.assert_close(value, weights(twin)[name], rtol=1e-7, atol=1e-8)
    return reference


def test_five_steps_are_those_of_the_reference():
    for momentum, nesterov in ((0.8, True), (0.95, True), (0.8, False), (0.0, True), (0.0, False)):
        torch.manual_seed(0)
        reference = assert_steps_of_the_reference(mlp(), batches(5), momentum=momentum, nesterov=nesterov)
        assert {True, False} == set(reference.bounded)


def test_blocks_are_those_of_the_reference():
    """Smaller than the sides: of tall, wide and square matrices, the size dividing a side or not."""
    for split_dim in (1, 2, 3, 4, 6, 7, None):
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)
        ).double()
        assert_steps_of_the_reference(model, batches(4, size=12), split_dim=split_dim)


def test_deep_networks_take_shorter_steps():
    """Fourteen matrices."""
    torch.manual_seed(3)
    hidden = [nn.Linear(5, 5) for _ in range(13)]
    for layer in hidden:
        nn.init.orthogonal_(layer.weight)  # all gradients are well-conditioned
    model = nn.Sequential(*hidden, nn.Linear(5, 3)).double()
    assert_steps_of_the_reference(model, batches(3, size=32))


def test_scale_of_the_loss_does_not_matter():
    """Ten steps of the same directions, whatever the loss is multiplied with (AdamW's epsilon aside)."""
    plain = mlp(bias=False)
    copies = [(scale, copy.deepcopy(plain)) for scale in (1e-6, 1e5)]
    one = ThorMuon(plain, update_interval=2)
    train(plain, one, batches(10))
    for scale, scaled in copies:
        two = ThorMuon(scaled, update_interval=2)
        for x, labels in batches(10):
            (scale * cross_entropy(labels)(scaled(x))).backward()
            two.step()
            two.zero_grad()
        for name, value in weights(plain).items():
            torch.testing.assert_close(weights(scaled)[name], value, rtol=1e-7, atol=1e-8)
        refreshes = [[curvature.refreshes for curvature in each.curvature.values()] for each in (one, two)]
        assert refreshes == [[5, 5, 5]] * 2


def test_length_of_the_first_step():
    """Each group of a convolution is a matrix of its own: ‖ΔW‖_F = lr √min(o, i) √max(1, o / i)."""
    for name in ("groups", "groups_strided", "depthwise", "plain", "whole_image"):
        model, x = conv_model(name)
        conv = model[2]
        before = conv.weight.detach().clone()
        optimizer = ThorMuon(model, lr=0.1, max_update_ratio=None)
        cross_entropy(torch.tensor([0, 1, 2]))(model(x)).backward()
        optimizer.step()
        change = (conv.weight.detach() - before).unflatten(0, (conv.groups, -1)).flatten(2)
        _, outputs, inputs = change.shape
        expected = 0.1 * math.sqrt(min(outputs, inputs)) * math.sqrt(max(1, outputs / inputs))
        torch.testing.assert_close(change.norm(dim=(1, 2)), torch.full((conv.groups,), expected).double())


def test_no_step_is_longer_than_a_share_of_the_weight():
    """Each group counts for itself, and a weight of zeros as 0.03 √d_out; a long step keeps its direction."""
    moved = {}
    for ratio in (0.02, None):
        torch.manual_seed(4)
        model, x = conv_model("groups")
        with torch.no_grad():
            model[2].weight[:3] *= 100
            model[2].weight[3:] = 0
        before = model[2].weight.detach().clone().unflatten(0, (2, 3)).flatten(1)
        optimizer = ThorMuon(model, lr=0.1, max_update_ratio=ratio)
        cross_entropy(torch.tensor([0, 1, 2]))(model(x)).backward()
        optimizer.step()
        moved[ratio] = model[2].weight.detach().unflatten(0, (2, 3)).flatten(1) - before
    torch.testing.assert_close(moved[0.02][0], moved[None][0])  # short, compared with its weights
    shortened = moved[None][1] * (0.02 * 0.03 * math.sqrt(3) / moved[None][1].norm())
    torch.testing.assert_close(moved[0.02][1], shortened)


def test_tall_kernel_in_channels_last():
    """Two groups of 16 outputs and 9 inputs: blocks of columns, of a weight that is no matrix in memory."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 32, 3, bias=False, groups=2), nn.Flatten(), nn.Linear(32, 2)).double()
        model = model.to(memory_format=layout)
        optimizer = ThorMuon(model)
        torch.manual_seed(1)
        for _ in range(3):
            cross_entropy(torch.tensor([0, 1]))(model(torch.randn(2, 2, 3, 3).double())).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model[0].weight.detach().contiguous())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_layer_without_gradient_is_left_where_it_is():
    """Zeros have no direction: no NaN, and no step."""
    model = mlp()
    with torch.no_grad():
        model[4].weight.zero_()  # so that no gradient reaches the layers before it
    before = weights(model)
    train(model, ThorMuon(model), batches(1))
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[4].weight, before["4.weight"])


@pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
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
    optimizer = ThorMuon(model, lr=0.1)
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


@pytest.mark.filterwarnings("ignore:.*single process")
def test_resume_is_never_having_stopped(tmp_path):
    setup = thor(mlp, ThorMuon, weight_decay=DECAY, **OPTIONS)
    assert_resumes(setup, (1, 3, 4), batches(8))
    assert_resumes(setup, (0, 3), batches(8), by_distributed_checkpoint(tmp_path, "plain"))


def test_asking_a_fresh_optimizer_for_its_state_is_no_step():
    """And it has the keys of any later one."""
    model = mlp()
    optimizer = ThorMuon(model, **OPTIONS)
    before = weights(model)
    get_optimizer_state_dict(model, optimizer)
    assert_same(before, weights(model))
    keys = keys_of(optimizer)
    train(model, optimizer, batches(3))
    assert keys_of(optimizer) == keys


def test_bfloat16_parameters_have_float32_state():
    model = mlp(dtype=torch.bfloat16)
    optimizer = ThorMuon(model)
    train(model, optimizer, batches(3, dtype=torch.bfloat16))
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        kept = optimizer.state[parameter]
        assert all(v.dtype == torch.float32 for v in kept.values() if isinstance(v, torch.Tensor)), name
