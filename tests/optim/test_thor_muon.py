"""The orthogonalised step against a slow float64 retelling of it, and what must not change it."""

import copy
import itertools
import math

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
    """(..., out, in): polar factors of the blocks along the smaller side, with the norm of a step
    at lr = 1.

    All singular values are 1, but those that are 0 to rounding: the rows of a softmax's gradient
    add up to zero.
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
    """Each group counts for itself, and a weight of zeros as 0.03 √d_out; a long step keeps its
    direction.
    """
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
