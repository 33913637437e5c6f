"""One step and ten steps of THOR, weight by weight, against the reference."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comparing import assert_same_steps, assert_same_weights, compare, having
from reference import ReferenceTHOR
from tiny import CONVOLUTIONS, assert_same, batches, conv_model, cross_entropy, mlp, train, weights
from torch_thor import THOR, param_groups


def labelled(count, size=8):
    return [(x, cross_entropy(labels)) for x, labels in batches(count, size)]


def images(name, count):
    """A model with the named convolution, and a stream of batches for it."""
    model, x = conv_model(name)
    return model, [(torch.randn_like(x), cross_entropy(torch.randint(3, (len(x),)))) for _ in range(count)]


def both(model, **options):
    """THOR and its reference, with the default bound, which is active on every parameter here."""
    return THOR(model, **options), ReferenceTHOR(model, **options)


OPTIONS = {
    "unbounded": {},
    "bounded": {"max_update_ratio": 0.01},
    "bounded_some": {"max_update_ratio": 0.05},
    "bounded_none": {"max_update_ratio": 1e3},
    "bounded_nesterov": {"max_update_ratio": 0.02, "nesterov": True, "weight_decay": 0.3},
    "bounded_no_momentum": {"max_update_ratio": 0.02, "momentum": 0.0},
    "clip_in_place_of_the_bound": {"max_update_ratio": 0.01, "kl_clip": 1e-3, "update_interval": 2},
    "no_momentum": {"momentum": 0.0},
    "nesterov": {"nesterov": True},
    "weight_decay": {"weight_decay": 0.3},
    "kl_clip": {"kl_clip": 1e-4, "weight_decay": 0.1},
    "kl_clip_wide": {"kl_clip": 1e4},
    "interval_1": {"update_interval": 1},
    "interval_callable": {"update_interval": lambda step: 1 + step},
    "factor_decay": {"update_interval": 2, "factor_decay": 0.7},
    "take_all": {"update_interval": 2, "trace_thresholds": (0.0, 0.0)},
    "keep_all": {"update_interval": 2, "trace_thresholds": (1e9, 0.0)},
    "keep_some": {"update_interval": 1, "trace_thresholds": (0.08, 0.0)},
    "stop_some": {"update_interval": 1, "trace_thresholds": (0.08, 0.01), "factor_decay": 0.2},
    "unsplit": {"split_dim": None},
    "diagonal": {"split_dim": 1},
    "blocks_of_4": {"split_dim": 4, "update_interval": 2},
    "large_damping": {"damping": 10.0, "lr": 1.0},
    "everything": {
        **{"lr": 0.02, "damping": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.05, "update_interval": 2},
        **{"trace_thresholds": (0.1, 0.01), "split_dim": 3, "factor_decay": 0.5, "kl_clip": 1e-3},
    },
}


def assert_same_decisions(optimizer, reference):
    for layer, curvature in reference.curvature.items():
        assert optimizer.curvature[layer].refreshes == curvature.refreshes
        assert optimizer.curvature[layer].stopped == curvature.stopped
        assert optimizer.curvature[layer].last_trace_change == pytest.approx(curvature.last_trace_change)


@pytest.mark.parametrize("name", OPTIONS)
def test_ten_steps_of_a_perceptron(name):
    optimizer, reference = compare(mlp(), labelled(10), **OPTIONS[name])
    assert_same_decisions(optimizer, reference)
    if name in ("keep_some", "stop_some"):  # else the ten steps would prove nothing about the trace rule
        assert any(1 < curvature.refreshes < 10 for curvature in reference.curvature.values())
        assert any(curvature.stopped for curvature in reference.curvature.values()) == (name == "stop_some")


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_steps_of_a_convolution(name):
    compare(*images(name, 1), momentum=0.0)
    compare(*images(name, 10), lr=0.01, update_interval=4, split_dim=5, weight_decay=0.01, factor_decay=0.3)


def test_convolutions_under_the_trace_rule_and_clipping():
    """Traces and the clip's sum run over all groups."""
    for name in ("groups", "depthwise", "uneven"):
        options = {"lr": 0.02, "update_interval": 1, "trace_thresholds": (0.25, 0.1), "kl_clip": 1e-3}
        assert_same_decisions(*compare(*images(name, 8), **options))


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
    model = nn.Sequential(*layers).double()
    assert_same_steps(model, *both(model, lr=0.01, **options), labelled(4, batch))


def test_linear_with_several_leading_dimensions():
    """A mean over tokens too, where `loss_terms` says how many; `mask.sum()`, a tensor, is how they are counted."""
    stream = [(torch.randn(3, 2, 4, 5).double(), cross_entropy(torch.randint(3, (3, 2, 4)))) for _ in range(5)]
    for terms in (None, 24, lambda: torch.ones(24).bool().sum()):
        model = mlp()
        reference = ReferenceTHOR(model, update_interval=2, loss_terms=terms and 24)
        assert_same_steps(model, having(THOR(model, update_interval=2), loss_terms=terms), reference, stream)


def test_plain_parameters_among_preconditioned_ones():
    """What is left out or unknown gets plain momentum; the layers around it still get the natural gradient."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(
        nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4), Scale(), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).double()
    options = {"update_interval": 2, "weight_decay": 0.1, "nesterov": True, "kl_clip": 1e-3}
    optimizer, _ = compare(
        model, labelled(6), **options, reference_options={"preconditioned": ["0", "6"]}, thor_options={"layers": "-3"}
    )
    assert list(optimizer.curvature) == ["0", "6"]


@pytest.mark.parametrize("forwards_first", [False, True])
def test_uneven_micro_batches(forwards_first):
    """If all forward passes come before all backward passes, rows must still meet their own gradients."""
    model, [(x, labels)] = mlp(), batches(1)
    optimizer, reference = both(model)
    parts = []
    for some in (slice(0, 5), slice(5, 6), slice(6, 8)):
        share, loss = len(x[some]) / len(x), cross_entropy(labels[some])
        parts.append((x[some], lambda output, loss=loss, share=share: loss(output) * share))
    losses = []
    for some_x, loss in parts:
        losses.append(loss(model(some_x)))
        if not forwards_first:
            losses.pop().backward()
    for loss in losses:
        loss.backward()
    optimizer.step()
    reference.step(*parts)
    assert_same_weights(model, reference, 0)


def test_groups_with_their_own_options():
    model = mlp()
    own = {"lr": 0.01, "damping": 0.5, "weight_decay": 0.2, "momentum": 0.5, "split_dim": 2}
    reference = ReferenceTHOR(model, groups={"0.weight": own, "0.bias": own}, update_interval=2)
    groups = [{"params": [*model[0].parameters()], **own}, {"params": [*model[2:].parameters()]}]
    optimizer = THOR(groups, model=model, update_interval=2)
    assert [group["damping"] for group in optimizer.param_groups] == [0.5, 0.03]
    assert_same_steps(model, optimizer, reference, labelled(6))


def test_a_bias_in_another_group_than_its_weight():
    """The usual decay and no-decay groups: the bias is still solved with its layer's G."""
    model = mlp()
    spared = {name: {"weight_decay": 0.0} for name, p in model.named_parameters() if p.ndim == 1 or name == "2.weight"}
    reference = ReferenceTHOR(model, groups=spared, weight_decay=0.3, update_interval=2)
    groups = param_groups(model, weight_decay=0.3, no_decay="2")
    assert_same_steps(model, THOR(groups, model=model, update_interval=2), reference, labelled(6))


def test_clip_takes_all_groups_together():
    """One step, one ν: the sum runs over all groups, each with its own learning rate."""
    model = mlp()
    reference = ReferenceTHOR(model, groups={f"{i}.bias": {"lr": 0.5} for i in (0, 2, 4)}, kl_clip=1e-2, momentum=0.0)
    biases = {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.5}
    others = {"params": [p for p in model.parameters() if p.ndim == 2]}
    assert_same_steps(model, THOR([biases, others], model=model, kl_clip=1e-2, momentum=0.0), reference, labelled(4))


def test_lr_and_damping_scheduled_by_hand():
    """Both are read from the group at every step; damping matters when the layer refreshes."""
    model = mlp()
    optimizer, reference = both(model, update_interval=2)
    for step, batch in enumerate(labelled(8)):
        options = {"lr": 0.05 / (1 + step), "damping": 0.3 * 0.7**step}
        reference.options.update(options)
        optimizer.param_groups[0].update(options)
        assert_same_steps(model, optimizer, reference, [batch])


def test_frozen_parts_stay_and_the_others_go_on():
    """Whole layers; a weight alone, whose bias then gets SGD for lack of factors; a bias alone."""
    for frozen in ("0", "2", "2.weight", "2.bias"):
        model = mlp()
        still = [p.requires_grad_(False) for name, p in model.named_parameters() if name.startswith(frozen)]
        before = [p.clone() for p in still]
        optimizer, reference = both(model, update_interval=2)
        assert_same_steps(model, optimizer, reference, labelled(4))
        assert all(map(torch.equal, still, before))
        if frozen != "2.bias":
            assert optimizer.curvature[frozen[0]].refreshes == 0 if frozen[0] in optimizer.curvature else True


def test_backward_for_some_parameters_only():
    """`backward(inputs=...)`: the other layers have no gradient and take no step."""
    model = mlp()
    optimizer = THOR(model)
    before = weights(model)
    [(x, loss)] = labelled(1)
    loss(model(x)).backward(inputs=list(model[4].parameters()))
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"4.weight", "4.bias"}
    assert optimizer.curvature["4"].rows_per_term == 1


class TwoHeads(nn.Module):
    """A trunk and two heads, of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.now = 0

    def forward(self, x):
        return self.heads[self.now](torch.tanh(self.trunk(x)))


def test_layer_without_gradient_this_step():
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


def test_evaluation_and_unused_forwards_leave_no_trace():
    """Only rows that a gradient came back for are statistics."""
    with_evaluation, without = mlp(), mlp()
    without.load_state_dict(with_evaluation.state_dict())
    optimizers = THOR(with_evaluation, update_interval=2), THOR(without, update_interval=2)
    noise = torch.randn(50, 5).double() * 100

    def evaluate():
        with_evaluation.eval()
        with torch.no_grad():
            with_evaluation(noise)
        with torch.inference_mode():
            with_evaluation(noise)
        with_evaluation.train()
        with_evaluation(noise)  # builds a graph that nobody differentiates

    for x, labels in batches(5):
        evaluate()
        output = with_evaluation(x)
        evaluate()
        cross_entropy(labels)(output).backward()
        evaluate()
        cross_entropy(labels)(without(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(with_evaluation), weights(without))


def test_zero_grad_discards_what_was_gathered():
    """A backward whose gradients are thrown away must not count."""
    for set_to_none in (True, False):
        model, fresh = mlp(), mlp()
        fresh.load_state_dict(model.state_dict())
        optimizers = THOR(model), THOR(fresh)
        [(x, labels), (other_x, other_labels)] = batches(2)
        cross_entropy(other_labels)(model(10 * other_x)).backward()
        optimizers[0].zero_grad(set_to_none=set_to_none)
        for one, optimizer in zip((model, fresh), optimizers, strict=True):
            cross_entropy(labels)(one(x)).backward()
            optimizer.step()
        assert_same(weights(model), weights(fresh))
        assert_same(optimizers[0].curvature["0"].factors(), optimizers[1].curvature["0"].factors())


def test_in_place_activations():
    """`nn.ReLU(inplace=True)` writes over the layer's output; the rows must not notice."""
    model, plain = (
        nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.ReLU(in_place), nn.Conv2d(4, 3, 2), nn.ReLU(in_place)),
            *(nn.Flatten(), nn.Linear(12, 3)),
        ).double()
        for in_place in (True, False)
    )
    plain.load_state_dict(model.state_dict())
    stream = [(torch.randn(3, 2, 5, 5).double(), cross_entropy(torch.tensor([0, 1, 2]))) for _ in range(4)]
    assert_same_steps(model, THOR(model, update_interval=2), ReferenceTHOR(plain, update_interval=2), stream)


def test_input_that_is_written_over_after_the_layer():
    """Reusing an input buffer between forward and backward must raise or not matter, never corrupt A."""
    model = nn.Sequential(nn.Linear(5, 3, bias=False)).double()
    optimizer = THOR(model, lr=0.0)
    x = torch.randn(4, 5).double()
    A = x.T @ x / 4
    loss = model(x).square().mean()
    x.mul_(100)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()
    optimizer.zero_grad()
    x.div_(100)
    model(x).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.curvature["0"].factors()[0], A)


def test_channels_last_is_the_same():
    model, stream = images("stride", 4)
    optimizer, reference = both(model, update_interval=2)
    model.to(memory_format=torch.channels_last)
    stream = [(x.to(memory_format=torch.channels_last), loss) for x, loss in stream]
    assert_same_steps(model, optimizer, reference, stream)


def test_float32_follows_float64():
    """The fast path in single precision stays near the oracle."""
    model = mlp(dtype=torch.float32)
    optimizer, reference = both(model, update_interval=3)
    for x, labels in batches(10):
        train(model, optimizer, [(x.float(), labels)])
        reference.step((x.float().double(), cross_entropy(labels)))
    for name, parameter in reference.model.named_parameters():
        got = model.get_parameter(name).detach().double()
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-3, atol=1e-4)
