"""The step of ThorMuon for layers of all kinds, for matrices without factors and for the rest.

The steps of linear layers: tests/test_readable_reference.py.
"""

import math

import pytest
import torch
from torch import nn

import every_kind
from tiny import batches, cross_entropy, mlp, told, train, weights
from torch_thor import ThorMuon

ADAMW_SHARE = 0.2  # of lr, for parameters that are no matrices
LR = 0.1
UNBOUNDED = {"lr": LR, "max_update_ratio": None}

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")


def step_of(matrices, size=None):
    """Return the steps of matrices (..., out, in) at lr = 1: the polar factors of their blocks.

    Singular values become 1, or 0 if they are 0 to rounding, as in the gradient of a softmax.
    """
    rows, columns = matrices.shape[-2:]
    wide = matrices if rows <= columns else matrices.mT
    parts = []
    for block in wide.double().split(size or 1000, dim=-2):
        left, values, right = torch.linalg.svd(block, full_matrices=False)
        parts.append((left * (values > 1e-9 * values.amax(-1, keepdim=True))[..., None, :]) @ right)
    polar = torch.cat(parts, dim=-2)
    polar = polar if rows <= columns else polar.mT
    norm = math.sqrt(min(rows, columns) * max(1.0, rows / columns))
    return polar * (norm / torch.linalg.matrix_norm(polar, keepdim=True))


def first_step(model, loss, **options):
    """Return the optimizer after a step, and the gradient and the move at lr = 1 by parameter."""
    optimizer = ThorMuon(model, **UNBOUNDED, **options)
    before = weights(model)
    loss(model).backward()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)  # of full rank; A needs the forward pass only
    optimizer.step()
    kept = 1 - LR * options.get("weight_decay", 0.0)
    return optimizer, {
        name: (parameter.grad, (kept * before[name] - parameter.detach()) / LR)
        for name, parameter in model.named_parameters()
    }


# layer -> (its parameter, the parameter as matrices (groups, out, in), by hand)
KNOWN = {
    "conv": ("conv.weight", lambda w: w.reshape(2, 1, 4)),
    "transposed": (
        "transposed.weight",
        lambda w: torch.stack([w[:1], w[1:]]).transpose(1, 2).reshape(2, 2, 2),
    ),
    "attention.q_proj": ("attention.in_proj_weight", lambda w: w[None, :4]),
    "attention.v_proj": ("attention.in_proj_weight", lambda w: w[None, 8:]),
    "attention.out_proj": ("attention.out_proj.weight", lambda w: w[None]),
    "cross.k_proj": ("cross.k_proj_weight", lambda w: w[None]),
    "experts.weight": ("experts.weight", lambda w: w),
    "rnn.weight_ih_l0": ("rnn.weight_ih_l0", lambda w: w[None]),
    "cell.weight_hh": ("cell.weight_hh", lambda w: w[None]),
    "head": ("head.weight", lambda w: w.T[None]),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("split_dim", [3, None])
def test_the_step_of_every_kind_of_layer(split_dim, layout):
    """``orth(u A⁻¹)`` for each group, whichever way the weight lies in memory."""
    model, x = every_kind.build().double().to(memory_format=layout), torch.randint(9, (6, 5))
    optimizer, steps = first_step(model, lambda m: m(x).square().mean(), split_dim=split_dim)
    for name, (parameter, matrices) in KNOWN.items():
        inverse, none = optimizer.curvature[name].inverses()
        assert none is None
        inverse = torch.stack(inverse) if isinstance(inverse, list) else inverse
        gradient, moved = map(matrices, steps[parameter])
        moved = moved / math.sqrt(10 / 25)  # the model has 25 matrices
        wanted = step_of(1.8 * gradient @ inverse, split_dim)
        torch.testing.assert_close(moved, wanted, rtol=1e-7, atol=1e-8, msg=name)
        difference = (moved - step_of(gradient, split_dim)).abs().max()
        assert difference > 1e-3, f"the inverse makes no difference to {name}"


@pytest.mark.parametrize(("changes", "times"), [(False, 1), (True, 0)])
def test_a_rate_that_never_changes_is_warned_of_once(changes, times):
    model = mlp()
    optimizer = ThorMuon(model)
    batch = batches(1)[0]

    def go():
        for step in range(310):
            if changes and step == 200:
                optimizer.param_groups[0]["lr"] *= 0.5
            train(model, optimizer, [batch])

    assert sum("lr has not changed in 300 steps. Let a sch" in text for text in told(go)) == times


# ---- parameters without factors ------------------------------------------------------------------


def louder(kind):
    """A convolution whose forward THOR does not know."""
    return type("Louder", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


class Odd(nn.Module):
    """One layer with factors; the rest has none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.louder = louder(nn.Conv2d)(4, 6, 3, groups=2, bias=False)
        self.transposed = louder(nn.ConvTranspose1d)(4, 6, 3, groups=2, bias=False)
        self.bilinear = nn.Bilinear(5, 4, 3)
        self.table = nn.Parameter(torch.randn(7, 3))
        self.positions = nn.Parameter(torch.randn(1, 4, 3))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.column = nn.Parameter(torch.randn(9, 1))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm((3, 4))
        self.head = nn.Linear(5, 2, bias=False)


# parameter -> its matrices, by hand
MATRICES = {
    "louder.weight": lambda w: w.reshape(2, 3, 18),
    "transposed.weight": lambda w: torch.stack([w[:2], w[2:]]).transpose(1, 2).reshape(2, 3, 6),
    "bilinear.weight": lambda w: w,
    "table": lambda w: w[None],
    "positions": lambda w: w,
}
NO_MATRIX = (
    "linear.bias", "bilinear.bias", "token", "column", "phase", "embedding.weight", "norm.weight",
    "norm.bias",
)  # fmt: skip


@pytest.mark.parametrize(("split_dim", "momentum"), [(2, 0.8), (None, 0.0)])
def test_matrices_without_factors_are_orthogonalised_and_the_rest_takes_steps_of_adamw(
    split_dim, momentum
):
    model = Odd()
    optimizer = ThorMuon(model, split_dim=split_dim, momentum=momentum, layers="-head", **UNBOUNDED)
    twins = {n: model.get_parameter(n).detach().clone().requires_grad_() for n in NO_MATRIX}
    rate = ADAMW_SHARE * LR
    adamw = torch.optim.AdamW(twins.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    buffers = dict.fromkeys(MATRICES, 0.0)
    for _ in range(3):
        before = weights(model)
        # no forward pass, so the others have no statistics
        for name in (*MATRICES, *NO_MATRIX):
            model.get_parameter(name).grad = torch.randn_like(before[name])
        for name, twin in twins.items():
            twin.grad = model.get_parameter(name).grad.clone()
        optimizer.step()
        adamw.step()
        for name, matrices in MATRICES.items():
            gradient = model.get_parameter(name).grad
            buffers[name] = momentum * buffers[name] + gradient
            moved = matrices((before[name] - model.get_parameter(name).detach()) / LR)
            wanted = step_of(matrices(gradient + momentum * buffers[name]), split_dim).float()
            torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-4, msg=name)
        for name, twin in twins.items():
            own = model.get_parameter(name)
            torch.testing.assert_close(own, twin, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("layers", "runs"),
    [
        (["-k_proj", "-v_proj"], [slice(8, 24)]),
        (["k_proj", "out_proj"], [slice(0, 8), slice(16, 24)]),
    ],
)
def test_projections_of_a_fused_weight_that_are_left_out_are_a_matrix_without_factors(layers, runs):
    model = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(3, 5, 8).double()
    optimizer, steps = first_step(
        model,
        lambda model: model(x, x, x)[0].square().mean(),
        layers=layers,
        split_dim=None,
        weight_decay=0.1,
    )
    gradient, moved = steps["in_proj_weight"]
    [entry] = [entry for entry in optimizer.coverage() if entry.name == "in_proj_weight"]
    assert entry.note.count("orthogonalised momentum for") == 3 - entry.groups
    for rows in runs:
        torch.testing.assert_close(moved[rows], step_of(gradient[rows]), rtol=1e-7, atol=1e-8)


@pytest.mark.filterwarnings("error")
def test_a_model_without_layers_is_trained_with_one_warning():
    model = nn.ParameterList([torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)])
    before = weights(model)
    with pytest.warns(UserWarning, match=r"0 of 35 .*0 \(5, 7\) \(orthogonalised momentum\)"):
        optimizer = ThorMuon([model[0]], model=model)
    optimizer.add_param_group({"params": [*model[1:]], "momentum": 0.0})
    for x, labels in batches(2, dtype=torch.float32):
        cross_entropy(labels)(torch.tanh(x @ model[0]) @ model[1] + model[2]).backward()
        optimizer.step()
    assert not any(value.equal(before[name]) for name, value in weights(model).items())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no layer to precondition"):
        ThorMuon(model)


def test_coverage_says_which_matrices_are_orthogonalised():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 6))
    optimizer = ThorMuon(model, layers="-0.v_proj", row_splits={"1": (2, 4)})
    shapes = {
        "0.in_proj_weight": ((8, 8),) * 3,
        "0.out_proj.weight": ((8, 8),),
        "1.weight": ((2, 8), (4, 8)),
    }
    assert {e.name: e.matrices for e in optimizer.coverage() if e.matrices} == shapes
    text = "A 8 x 2 groups; orthogonalised: 3 of 8 x 8; orthogonalised momentum for '0.v_proj'"
    assert text in repr(optimizer)
