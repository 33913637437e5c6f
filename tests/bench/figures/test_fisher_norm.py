"""The F-norm of a Fisher block against the Kronecker product itself, in float64; and when it is taken."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_thor import THOR, intervals
from torch_thor.bench.figures.fisher_norm import (
    Norms,
    factors_of,
    fisher_norm,
    inner_product,
    norm_changes,
    relative_distance,
)
from torch_thor.curvature import Decision, RefreshEvent
from torch_thor.training import Point, Ranks, UserError, build, load_recipe, open_task, train

GROUPS = 2


def model():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=GROUPS),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2),
        nn.Flatten(),
        nn.Linear(3 * 4, 5),
    ).double()


def step(net, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(6, 2, 6, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(5, (6,), generator=generator)
    functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    return images, labels


def dense_blocks(net, images, labels):
    """T · A ⊗ G of the three layers from rows that are written out; the grouped one's blocks on one diagonal."""
    inputs, x = [], images
    outputs = []
    for module in net:
        inputs.append(x)
        x = module(x)
        x.retain_grad()
        outputs.append(x)
    functional.cross_entropy(x, labels).backward()
    blocks = {}
    for name in ("0", "2", "4"):
        module, x, g = net[int(name)], inputs[int(name)].detach(), outputs[int(name)].grad * len(images)
        groups = getattr(module, "groups", 1)
        if isinstance(module, nn.Linear):
            a, g = x[:, :, None], g[:, :, None]
        else:
            a = functional.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)
            g = g.flatten(2)
        rows_a, rows_g = (rows.transpose(1, 2).flatten(0, 1) for rows in (a, g))  # (R, features)
        count, per_term = len(rows_a), len(rows_a) / len(images)
        krons = []
        for own_a, own_g in zip(rows_a.chunk(groups, 1), rows_g.chunk(groups, 1), strict=True):
            krons.append(per_term * torch.kron(own_a.T @ own_a / count, own_g.T @ own_g / count))
        blocks[name] = torch.block_diag(*krons)
    net.zero_grad()
    return blocks


def test_norm_and_distance_are_those_of_the_kronecker_product():
    net = model()
    optimizer = THOR(net, lr=0.01, update_interval=1, trace_thresholds=(0.0, 0.0), split_dim=None)
    seen = []
    for seed in (1, 2):
        weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        images, labels = step(net, optimizer, seed)
        twin = model()
        twin.load_state_dict(weights)  # the factors are those of the weights before the step
        own = {name: factors_of(layer) for name, layer in optimizer.curvature.items()}
        seen.append((own, dense_blocks(twin, images, labels)))
    (before, dense_before), (now, dense_now) = seen
    assert set(now) == set(dense_now) == {"0", "2", "4"}
    for name, dense in dense_now.items():
        assert fisher_norm(now[name]) == pytest.approx(float(dense.norm()), rel=1e-10)
        assert inner_product(now[name], before[name]) == pytest.approx(
            float((dense * dense_before[name]).sum()), rel=1e-10
        )
        far = float((dense - dense_before[name]).norm() / dense_before[name].norm())
        assert relative_distance(now[name], before[name]) == pytest.approx(far, rel=1e-9)
    assert now["0"][0] == 9
    assert len(now["0"][1]) == GROUPS


def test_distance_from_nothing_is_none():
    zero, some = ((1.0, [torch.full((1, 1), v)], [torch.ones(1, 1)]) for v in (0.0, 2.0))
    assert relative_distance(some, zero) is None
    assert relative_distance(zero, some) == 1
    assert relative_distance(some, some) == 0


def test_changes_of_a_norm():
    assert norm_changes([2.0, 3.0, 1.5]) == [0.5, 0.5]
    assert math.isnan(norm_changes([0.0, 1.0])[0])


def test_taken_at_every_refresh_of_a_growing_interval():
    recipe = load_recipe("digits", ["steps=20", "batch_size=32", "trace_thresholds=thor_nt", "device=cpu"])
    run = build(recipe, "thor", open_task(recipe, torch.device("cpu"), print), Ranks())
    for group in run.optimizer.param_groups:
        group["update_interval"] = intervals.Geometric(2, 5, 1.5)
    norms = Norms()
    train(run, [norms])
    columns = norms.columns()
    assert columns["step"] == [1, 3, 6, 10, 15, 20]
    assert [after - before for before, after in itertools.pairwise(columns["step"])] == [2, 3, 4, 5, 5]
    assert columns["layers"] == list(run.optimizer.curvature) == ["conv1", "conv2", "hidden", "head"]
    last = [fisher_norm(factors_of(layer)) for layer in run.optimizer.curvature.values()]
    assert columns["norm"][-1] == last
    assert columns["distance"][0] == [None] * 4
    assert all(value > 0 for row in columns["distance"][1:] for value in row)


def test_a_layer_that_cannot_be_inverted_is_named():
    decisions = {"conv1": Decision.UPDATE, "head": Decision.FAILED}
    events = tuple(RefreshEvent(layer, 3, decision, None, 1.0) for layer, decision in decisions.items())
    point = Point(4, 1.0, 0.1, 0.1, 1.0, 0.1, 0.0, 1, skipped=False, refresh=True, events=events)
    with pytest.raises(UserError, match="factors of head cannot be inverted"):
        Norms().step(type("Stub", (), {"step": 4})(), point)
