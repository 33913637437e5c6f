"""The orthogonalised step against a slow float64 retelling of it, and what must not change it."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn

import every_kind
from reference import by_stages
from tiny import batches, conv_model, cross_entropy, mlp, told, train, weights
from torch_thor import ThorMuon, param_groups

ADAMW_SHARE = 0.2  # of lr, for what is no matrix
LR = 0.1
UNBOUNDED = {"lr": LR, "max_update_ratio": None}

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")


def step_of(matrices, size=None):
    """(..., out, in): polar factors of the blocks along the smaller side, as long as at lr = 1.

    All singular values are 1, but those that are 0 to rounding, as of a softmax's gradient.
    """
    rows, columns = matrices.shape[-2:]
    wide, parts = matrices if rows <= columns else matrices.mT, []
    for block in wide.double().split(size or 1000, dim=-2):
        left, values, right = torch.linalg.svd(block, full_matrices=False)
        parts.append((left * (values > 1e-9 * values.amax(-1, keepdim=True))[..., None, :]) @ right)
    polar = torch.cat(parts, dim=-2)
    polar = polar if rows <= columns else polar.mT
    norm = math.sqrt(min(rows, columns) * max(1.0, rows / columns))
    return polar * (norm / torch.linalg.matrix_norm(polar, keepdim=True))


def damped_inverse(factor, damping, size):
    """(M + λ tr(M)/n I)⁻¹ of what is left of M when all between blocks of a size is dropped."""
    blocks = torch.block_diag(
        *(torch.ones(len(part), len(part)) for part in factor.split(size or 1000))
    )
    shift = damping * factor.trace() / len(factor)
    return torch.linalg.inv(blocks * factor + shift * torch.eye(len(factor)))


OPTIONS = {
    "lr": 0.05, "damping": 0.2, "update_interval": 2, "factor_decay": 0.3, "max_update_ratio": 0.08
}  # fmt: skip
DECAY = 0.4


class Reference:
    """The weights of linear layers; biases are left to torch's AdamW."""

    def __init__(self, model, *, momentum=0.8, nesterov=True, split_dim=128):
        self.layers = [m for m in model if isinstance(m, nn.Linear)]
        self.momentum, self.nesterov, self.size, self.step_number = momentum, nesterov, split_dim, 0
        self.factors, self.buffers, self.inverses, self.bounded = {}, {}, {}, set()
        biases = [layer.bias for layer in self.layers]
        self.adamw = torch.optim.AdamW(
            biases, lr=ADAMW_SHARE * OPTIONS["lr"], betas=(0.9, 0.95), weight_decay=0.0
        )

    @torch.no_grad()
    def step(self, inputs):
        """`inputs`: of each layer, the rows of its input."""
        for i, (layer, a) in enumerate(zip(self.layers, inputs, strict=True)):
            grad, weight = layer.weight.grad, layer.weight
            if self.step_number % OPTIONS["update_interval"] == 0:
                fresh, decay = a.T @ a / len(a), OPTIONS["factor_decay"]
                self.factors[i] = decay * self.factors.get(i, fresh) + (1 - decay) * fresh
                self.inverses[i] = damped_inverse(self.factors[i], OPTIONS["damping"], self.size)
            v = self.buffers[i] = self.momentum * self.buffers.get(i, 0.0) + grad
            u = grad + self.momentum * v if self.nesterov else v
            weight *= 1 - OPTIONS["lr"] * DECAY
            lr = OPTIONS["lr"] * math.sqrt(min(1, 10 / len(self.layers)))
            d = lr * step_of(u @ self.inverses[i], self.size)
            norm = max(float(weight.norm()), 0.03 * math.sqrt(len(weight)))
            longest = OPTIONS["max_update_ratio"] * norm
            self.bounded.add(float(d.norm()) > longest)
            weight -= d * min(1.0, longest / float(d.norm()))
        self.adamw.step()
        self.step_number += 1


def perceptron(*widths):
    layers = [nn.Linear(*sizes) for sizes in itertools.pairwise(widths)]
    for layer in layers if len(layers) > 10 else ():
        nn.init.orthogonal_(layer.weight)  # all gradients are well-conditioned
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))[:-1].double()


MOMENTA = ((0.8, True), (0.95, True), (0.8, False), (0.0, True), (0.0, False))
CASES = [
    *(((5, 7, 6, 3), 8, {"momentum": momentum, "nesterov": nesterov})
      for momentum, nesterov in MOMENTA),
    # of tall, wide and square matrices, the size dividing a side or not
    *(((5, 9, 9, 4, 3), 12, {"split_dim": size}) for size in (1, 2, 3, 4, 6, 7, None)),
    ((*[5] * 14, 3), 32, {}),  # the steps of fourteen matrices are shorter
]  # fmt: skip


def test_steps_are_those_of_the_reference():
    bounded = set()
    for widths, batch, options in CASES:
        torch.manual_seed(0)
        model = perceptron(*widths)
        twin = copy.deepcopy(model)
        groups = param_groups(model, weight_decay=DECAY)
        optimizer = ThorMuon(groups, model=model, **OPTIONS, **options)
        reference = Reference(twin, **options)
        for x, labels in batches(5, batch):
            train(model, optimizer, [(x, labels)])
            output, seen = by_stages(twin, x)
            cross_entropy(labels)(output).backward()
            reference.step([a.detach() for _, a, _ in seen[::2]])
            twin.zero_grad()
            for name, value in weights(model).items():
                where = f"{name} of {widths}, {options}"
                wanted = weights(twin)[name]
                torch.testing.assert_close(value, wanted, rtol=1e-7, atol=1e-8, msg=where)
        bounded |= reference.bounded
    assert bounded == {True, False}


def first_step(model, loss, name, **options):
    """The optimizer, and a parameter's gradient in the first step, and its move at lr = 1."""
    optimizer = ThorMuon(model, **UNBOUNDED, **options)
    parameter = model.get_parameter(name)
    before = parameter.detach() * (1 - LR * options.get("weight_decay", 0.0))
    loss(model).backward()
    parameter.grad = torch.randn_like(parameter)  # of full rank: A is of the forward pass alone
    optimizer.step()
    return optimizer, parameter.grad, (before - parameter.detach()) / LR


# layer -> (its parameter, that as matrices (groups, out, in), by hand)
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


def test_a_preconditioned_step_of_every_memory_layout():
    """``orth(u A⁻¹)``, each group for itself, whichever way round the weight lies in memory."""
    layouts = (torch.contiguous_format, torch.channels_last)
    for name, split_dim, layout in itertools.product(KNOWN, (3, None), layouts):
        label, matrices = KNOWN[name]
        model, x = every_kind.build().double().to(memory_format=layout), torch.randint(9, (6, 5))
        loss = lambda model, x=x: model(x).square().mean()  # noqa: E731
        optimizer, gradient, moved = first_step(model, loss, label, split_dim=split_dim)
        inverse, none = optimizer.curvature[name].inverses()
        assert none is None
        inverse = torch.stack(inverse) if isinstance(inverse, list) else inverse
        # of 25 matrices
        moved, ahead = matrices(moved) / math.sqrt(10 / 25), matrices(1.8 * gradient)
        torch.testing.assert_close(
            moved, step_of(ahead @ inverse, split_dim), rtol=1e-7, atol=1e-8, msg=name
        )
        difference = (moved - step_of(ahead, split_dim)).abs().max()
        assert difference > 1e-3, f"the inverse makes no difference to {name}"


def test_no_step_is_longer_than_a_share_of_the_weight():
    """Each group counts for itself, and a weight of zeros as 0.03 √d_out."""
    moved = {}
    for ratio in (0.02, None):
        torch.manual_seed(4)
        model, x = conv_model("groups")
        with torch.no_grad():
            model[2].weight[:3] *= 100
            model[2].weight[3:] = 0
        before = model[2].weight.detach().clone().unflatten(0, (2, 3)).flatten(1)
        train(
            model, ThorMuon(model, lr=0.1, max_update_ratio=ratio), [(x, torch.tensor([0, 1, 2]))]
        )
        moved[ratio] = model[2].weight.detach().unflatten(0, (2, 3)).flatten(1) - before
    torch.testing.assert_close(moved[0.02][0], moved[None][0])  # short, compared with its weights
    shortened = moved[None][1] * (0.02 * 0.03 * math.sqrt(3) / moved[None][1].norm())
    torch.testing.assert_close(moved[0.02][1], shortened)


@pytest.mark.parametrize(
    ("anytime", "changes", "times"), [(False, False, 1), (False, True, 0), (True, False, 0)]
)
def test_a_rate_that_never_moves_is_said_once(anytime, changes, times):
    model = mlp()
    optimizer = ThorMuon(model, anytime=anytime)
    batch = batches(1)[0]

    def go():
        for step in range(310):
            if changes and step == 200:
                optimizer.param_groups[0]["lr"] *= 0.5
            train(model, optimizer, [batch])

    assert sum("lr has not changed in 300 steps. Let a sch" in text for text in told(go)) == times


# ---- matrices without factors, and what is no matrix ---------------------------------------------


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
    """Matrices: u = ∇ + μ v, orthogonalised with the norm of their shape; the rest: AdamW's."""
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
    """Each run of them is a matrix without factors, with weight decay as the others."""
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
