"""The step of ThorMuon of what is a matrix and has no factors, and of what is no matrix."""

import warnings

import pytest
import torch
from test_thor_muon import ADAMW_SHARE, LR, UNBOUNDED, first_step, step_of
from torch import nn

from tiny import batches, cross_entropy, weights
from torch_thor import ThorMuon

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")


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


@pytest.mark.parametrize(("split_dim", "momentum"), [(2, 0.8), (None, 0.8), (2, 0.0)])
def test_steps_of_what_has_no_factors(split_dim, momentum):
    """Matrices: u = ∇ + μ v, orthogonalised and given the norm of their shape; what is no matrix:
    AdamW's.
    """
    model = Odd()
    optimizer = ThorMuon(model, split_dim=split_dim, momentum=momentum, layers="-head", **UNBOUNDED)
    assert "orthogonalised momentum: " in repr(optimizer)
    assert "AdamW: no matrix" in repr(optimizer)
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
        ("-q_proj", [slice(0, 8)]),
        (["-k_proj", "-v_proj"], [slice(8, 24)]),
        (["k_proj", "out_proj"], [slice(0, 8), slice(16, 24)]),
    ],
)
def test_rows_of_a_fused_weight_that_are_left_out(layers, runs):
    """Each run of them is a matrix without factors, with weight decay as the others; coverage says
    so.
    """
    model = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(3, 5, 8).double()
    optimizer, gradient, moved = first_step(
        model, lambda model: model(x, x, x)[0].square().mean(), "in_proj_weight",
        layers=layers, split_dim=None, weight_decay=0.1,
    )  # fmt: skip
    [entry] = [entry for entry in optimizer.coverage() if entry.name == "in_proj_weight"]
    assert entry.note.count("orthogonalised momentum for") == 3 - entry.groups
    for rows in runs:
        torch.testing.assert_close(moved[rows], step_of(gradient[rows]), rtol=1e-7, atol=1e-8)


def test_a_model_without_a_layer():
    """It is trained, with one warning; a group may be added."""
    model = nn.ParameterList([torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)])
    before = weights(model)
    with pytest.warns(UserWarning, match=r"0 of 35 .*0 \(5, 7\) \(orthogonalised momentum\)"):
        optimizer = ThorMuon([model[0]], model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": [*model[1:]], "momentum": 0.0})
        for x, labels in batches(2, dtype=torch.float32):
            cross_entropy(labels)(torch.tanh(x @ model[0]) @ model[1] + model[2]).backward()
            optimizer.step()
    assert not any(value.equal(before[name]) for name, value in weights(model).items())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no layer to precondition"):
        ThorMuon(model)


def test_coverage_says_which_matrices_are_orthogonalised():
    model = Odd()
    optimizer = ThorMuon(model, layers="-head")
    shapes = {
        name: [tuple(one.shape) for one in cut(model.get_parameter(name))]
        for name, cut in MATRICES.items()
    }
    shapes["bilinear.weight"], shapes["linear.weight"] = [(5, 4)] * 3, [(5, 6)]
    assert {e.name: [*e.matrices] for e in optimizer.coverage() if e.matrices} == shapes
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
