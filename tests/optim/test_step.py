"""Steps of THOR, weight by weight, against the reference."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comparing import assert_same_steps, compare
from reference import ReferenceTHOR
from tiny import CONVOLUTIONS, batches, conv_model, cross_entropy, mlp, train, twins, weights
from torch_thor import THOR


def labelled(count, size=8):
    return [(x, cross_entropy(labels)) for x, labels in batches(count, size)]


def images(name, count):
    """A model with the named convolution, and a stream of batches for it."""
    model, x = conv_model(name)
    return model, [
        (torch.randn_like(x), cross_entropy(torch.randint(3, (len(x),)))) for _ in range(count)
    ]


BOUNDED = {"max_update_ratio": 0.01}  # the default, which is active on every parameter here
OPTIONS = {  # other sizes of blocks, dampings, intervals and averages are in `test_any_perceptron`
    "unbounded": {},
    "bounded_some": {"max_update_ratio": 0.05},
    "bounded_nesterov": {"max_update_ratio": 0.02, "nesterov": True, "weight_decay": 0.3},
    "clip_in_place_of_the_bound": {"max_update_ratio": 0.01, "kl_clip": 1e-3, "update_interval": 2},
    "no_momentum": {"momentum": 0.0},
    "weight_decay": {"weight_decay": 0.3},
    "kl_clip": {"kl_clip": 1e-4, "weight_decay": 0.1},
    "interval_callable": {"update_interval": lambda step: 1 + step},
    "keep_all": {"update_interval": 2, "trace_thresholds": (1e9, 0.0)},
    "keep_some": {"update_interval": 1, "trace_thresholds": (0.08, 0.0)},
    "stop_some": {"update_interval": 1, "trace_thresholds": (0.08, 0.01), "factor_decay": 0.2},
    "everything": {
        "lr": 0.02, "damping": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.05,
        "update_interval": 2, "trace_thresholds": (0.1, 0.01), "split_dim": 3, "factor_decay": 0.5,
        "kl_clip": 1e-3,
    },
}  # fmt: skip


def assert_same_decisions(optimizer, reference):
    for layer, curvature in reference.curvature.items():
        assert optimizer.curvature[layer].refreshes == curvature.refreshes
        assert optimizer.curvature[layer].stopped == curvature.stopped
        assert optimizer.curvature[layer].last_trace_change == pytest.approx(
            curvature.last_trace_change
        )


@pytest.mark.parametrize("name", OPTIONS)
def test_ten_steps_of_a_perceptron(name):
    optimizer, reference = compare(mlp(), labelled(10), **OPTIONS[name])
    assert_same_decisions(optimizer, reference)
    # else the ten steps would prove nothing about the trace rule
    if name in ("keep_some", "stop_some"):
        assert any(1 < curvature.refreshes < 10 for curvature in reference.curvature.values())
        assert any(curvature.stopped for curvature in reference.curvature.values()) == (
            name == "stop_some"
        )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_steps_of_a_convolution(name):
    """Traces and the clip's sum run over all groups."""
    options = {"lr": 0.01, "update_interval": 2, "weight_decay": 0.01, "factor_decay": 0.3}
    compare(*images(name, 5), split_dim=5, **options)
    if name == "groups":
        options = {"lr": 0.02, "update_interval": 1, "trace_thresholds": (0.25, 0.1)}
        assert_same_decisions(*compare(*images(name, 8), kl_clip=1e-3, **options))


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    batch=st.integers(1, 5),
    split_dim=st.one_of(st.none(), st.integers(1, 7)),
    bias=st.booleans(),
    nesterov=st.booleans(),
    damping=st.floats(0.01, 10),
    factor_decay=st.sampled_from([0.0, 0.6]),
    update_interval=st.integers(1, 3),
)
def test_any_perceptron(widths, batch, bias, **options):
    layers = [nn.Linear(i, o, bias=bias) for i, o in pairwise([5, *widths, 3])]
    compare(nn.Sequential(*layers).double(), labelled(4, batch), **BOUNDED, lr=0.01, **options)


NAMES = [name for name, _ in mlp().named_parameters()]
NO_DECAY = {name: {"weight_decay": 0.0} for name in (*NAMES[1::2], "2.weight")}
OWN = {"lr": 0.01, "damping": 0.5, "weight_decay": 0.2, "momentum": 0.5, "split_dim": 2}


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"update_interval": 2}, {"4.weight": OWN, "4.bias": OWN}),
        ({"update_interval": 2, "weight_decay": 0.3}, NO_DECAY),
        ({}, {"0.weight": {"max_update_ratio": 0.02}, "2.bias": {"max_update_ratio": None}}),
        ({"kl_clip": 1e-2, "momentum": 0.0}, {name: {"lr": 0.5} for name in NAMES[1::2]}),
    ],
)
def test_groups_with_options_of_their_own(options, groups):
    """Some are added later. A bias is solved with its layer's G; a clip sums over all groups."""
    model = mlp()
    given = [{"params": [p], **groups.get(name, {})} for name, p in model.named_parameters()]
    optimizer = THOR(given[:4], model=model, **options)
    reference = ReferenceTHOR(model, groups=groups, **options)
    for group in given[4:]:
        optimizer.add_param_group(group)
    assert_same_steps(model, optimizer, reference, labelled(6))


def test_lr_and_damping_scheduled_by_hand():
    """Both are read at every step; a first step of lr 0 refreshes and fills the momentum."""
    model, changing = mlp(), {"update_interval": 2, "trace_thresholds": (0.08, 0.0)}
    optimizer, reference = THOR(model, **changing), ReferenceTHOR(model, **changing)
    for step, batch in enumerate(labelled(8)):
        options = {"lr": 0.01 * step, "damping": 0.3 * 0.7**step}
        reference.options.update(options)
        optimizer.param_groups[0].update(options)
        assert_same_steps(model, optimizer, reference, [batch])
        assert_same_decisions(optimizer, reference)


def test_a_sum_takes_the_steps_of_a_mean():
    """With a rate that is divided by the number of loss terms."""
    options = {"update_interval": 2, "max_update_ratio": None}
    model, mean, twin, _ = twins(THOR, lr=0.04, **options)
    summed = THOR(twin, lr=0.04 / 8, loss_reduction="sum", **options)
    for x, loss in labelled(6):
        loss(model(x)).backward()
        (8 * loss(twin(x))).backward()
        for optimizer in (mean, summed):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["0", "2.weight", "2.bias"])
def test_frozen_parts_stay_and_the_others_go_on(frozen):
    """The bias of a frozen weight gets SGD for lack of factors."""
    model = mlp()
    named = model.named_parameters()
    still = [p.requires_grad_(False) for name, p in named if name.startswith(frozen)]
    before = [p.clone() for p in still]
    optimizer, _ = compare(model, labelled(4), **BOUNDED, update_interval=2)
    assert all(map(torch.equal, still, before))
    assert bool(optimizer.curvature[frozen[0]].refreshes) == (frozen == "2.bias")


@pytest.mark.parametrize("decay", [{}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_what_is_left_out_takes_the_steps_of_sgd(momentum, decay):
    """To the last bit, and its momentum is SGD's."""
    model = mlp(dtype=torch.float32)
    plain = [*model[:3].parameters()]
    twins = [parameter.detach().clone().requires_grad_() for parameter in plain]
    options = {"momentum": 0.0, **momentum, **decay, "lr": 0.1}
    optimizer = THOR(model, layers="4", max_update_ratio=None, **options)
    sgd = torch.optim.SGD(twins, **options)
    for x, labels in batches(6, dtype=torch.float32):
        cross_entropy(labels)(model(x)).backward()
        for parameter, twin in zip(plain, twins, strict=True):
            twin.grad = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        sgd.step()
        assert all(map(torch.equal, plain, twins))
    for parameter, twin in zip(plain, twins, strict=True) if momentum else ():
        own, its = optimizer.state[parameter], sgd.state[twin]
        assert torch.equal(own["momentum_buffer"], its["momentum_buffer"])


class TwoHeads(nn.Module):
    """A trunk and two heads; a forward pass uses a single head."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.now = 0

    def forward(self, x):
        return self.heads[self.now](torch.tanh(self.trunk(x)))


def test_a_layer_without_a_gradient_in_this_step_does_not_move():
    """Like SGD: no gradient, no change, neither by momentum nor by weight decay."""

    def by_hand(reference, x):
        y1 = reference.trunk(x)
        x2 = torch.tanh(y1)
        y2 = reference.heads[model.now](x2)
        return y2, [("trunk", x, y1), (f"heads.{model.now}", x2, y2)]

    model = TwoHeads().double()
    options = {"update_interval": 1, "trace_thresholds": (0.0, 0.0), "weight_decay": 0.1}
    reference, optimizer = ReferenceTHOR(model, forward=by_hand, **options), THOR(model, **options)
    for now, batch in zip((0, 0, 1, 1, 0, 1, 0, 0), labelled(8), strict=True):
        model.now, idle = now, model.heads[1 - now].weight
        before = idle.detach().clone()
        assert_same_steps(model, optimizer, reference, [batch])
        assert torch.equal(idle, before)


def test_float32_follows_float64():
    model = mlp(dtype=torch.float32)
    optimizer, reference = THOR(model, update_interval=3), ReferenceTHOR(model, update_interval=3)
    for x, labels in batches(10):
        train(model, optimizer, [(x.float(), labels)])
        reference.step((x.float().double(), cross_entropy(labels)))
    for name, parameter in reference.model.named_parameters():
        got = model.get_parameter(name).detach().double()
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-3, atol=1e-4)
