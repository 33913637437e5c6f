"""Patterns for `decay_filter`: the same training as with a callable, also in copies and with shared weights."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR


def admitted(patterns, model):
    filtered = THOR(model, decay_filter=patterns).decay_filter
    return {name for name, p in model.named_parameters() if filtered(name, p)}


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_patterns_are_the_callable_that_they_describe(scaling):
    models = [model := mlp(), copy.deepcopy(model)]
    filters = ["-*.bias", lambda name, parameter: not name.endswith(".bias")]
    for model, one in zip(models, filters, strict=True):
        train(model, THOR(model, lr=0.01, weight_decay=0.3, decay_filter=one, scaling=scaling), batches(3))
    assert_same(*(weights(model) for model in models))


def test_names_modules_and_exceptions():
    model = nn.ModuleDict({"conv": nn.Conv1d(1, 2, 2), "bn": nn.BatchNorm1d(2), "head": nn.Linear(2, 2)})
    assert admitted("conv", model) == {"conv.weight", "conv.bias"}
    assert admitted("*.weight", model) == {"conv.weight", "bn.weight", "head.weight"}
    assert admitted(["*.weight", "-bn"], model) == {"conv.weight", "head.weight"}
    assert admitted(("-*.bias", "-bn*"), model) == {"conv.weight", "head.weight"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.embedding.weight


def test_a_shared_weight_is_known_by_all_its_names():
    model = Tied()
    assert admitted("-decoder", model) == set()
    assert admitted("decoder.weight", model) == {"embedding.weight"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_keeps_its_patterns(copied):
    model = mlp()
    optimizer = THOR(model, lr=0.01, weight_decay=0.3, decay_filter=["*.weight"])
    train(model, optimizer, batches(1))
    other = copied(optimizer)
    train(model, optimizer, batches(3)[1:])
    train(other.model, other, batches(3)[1:])
    assert_same(weights(model), weights(other.model))


def test_a_layer_that_is_added_later_is_looked_at_too():
    model = mlp()
    optimizer = THOR(model, decay_filter="-*.bias")
    model.add_module("more", nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(model.more.parameters())})
    assert optimizer.decay_filter("more.weight", model.more.weight)
    assert not optimizer.decay_filter("more.bias", model.more.bias)


@pytest.mark.parametrize("wrong", ["nosuch", ["*.weight", "-nosuch"], [], {"a": 1}, [3], torch.ones(1)])
def test_what_is_no_filter(wrong):
    with pytest.raises(ValueError, match=r"decay_filter=.*decay_filter must be"):
        THOR(mlp(), decay_filter=wrong)
