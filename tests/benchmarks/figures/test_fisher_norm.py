"""The F-norm of a Fisher block against the Kronecker product itself, in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.figures.fisher_norm import Norms, factors_of, inner_product, relative_distance
from torch_thor import THOR
from torch_thor.curvature import Decision, RefreshEvent
from torch_thor.errors import UserError


def model():
    layers = (
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    return nn.Sequential(*layers).double()


def dense_blocks(net, images, labels):
    """T · A ⊗ G of the two layers from rows that are written out; the grouped one's blocks on one
    diagonal.
    """
    seen = [images]
    for module in net:
        seen.append(module(seen[-1]))
        seen[-1].retain_grad()
    functional.cross_entropy(seen[-1], labels).backward()
    g = len(images) * seen[1].grad.flatten(2)
    a = functional.unfold(images, 3, padding=1, stride=2)
    rows = {
        "0": (a.mT.flatten(0, 1), g.mT.flatten(0, 1), 2),
        "3": (seen[3].detach(), len(images) * seen[4].grad, 1),
    }
    net.zero_grad()
    blocks = {}
    for name, (a, g, groups) in rows.items():
        parts = zip(a.chunk(groups, 1), g.chunk(groups, 1), strict=True)
        krons = [torch.kron(own.T @ own / len(a), other.T @ other / len(g)) for own, other in parts]
        blocks[name] = len(a) / len(images) * torch.block_diag(*krons)
    return blocks


def test_norm_and_distance_are_those_of_the_kronecker_product():
    net, seen = model(), []
    optimizer = THOR(net, lr=0.01, update_interval=1, trace_thresholds=(0.0, 0.0), split_dim=None)
    for _ in range(2):
        images, labels = torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(5, (6,))
        # before the step: the factors are those of these weights
        dense = dense_blocks(net, images, labels)
        optimizer.zero_grad()  # its backward pass is none of this step
        functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(
            ({name: factors_of(layer) for name, layer in optimizer.curvature.items()}, dense)
        )
    (before, dense_before), (now, dense_now) = seen
    assert set(now) == set(dense_now) == {"0", "3"}
    for name, dense in dense_now.items():
        old = dense_before[name]
        assert inner_product(now[name], now[name]) == pytest.approx(
            float(dense.norm()) ** 2, rel=1e-10
        )
        assert inner_product(now[name], before[name]) == pytest.approx(
            float((dense * old).sum()), rel=1e-10
        )
        far = float((dense - old).norm() / old.norm())
        assert relative_distance(now[name], before[name]) == pytest.approx(far, rel=1e-9)


def test_distance_from_nothing_is_none():
    zero, some = ((1.0, [torch.full((1, 1), v)], [torch.ones(1, 1)]) for v in (0.0, 2.0))
    assert relative_distance(some, zero) is None
    assert (relative_distance(zero, some), relative_distance(some, some)) == (1, 0)


def test_a_layer_that_cannot_be_inverted_is_named():
    decisions = {"conv1": Decision.UPDATE, "head": Decision.FAILED}
    events = tuple(
        RefreshEvent(layer, 3, decision, None, 1.0) for layer, decision in decisions.items()
    )
    with pytest.raises(UserError, match="step 4: the factors of head cannot be inverted"):
        Norms().step(SimpleNamespace(step=4), SimpleNamespace(events=events))
