"""Between refreshes nothing of ours runs or is kept, and the model never carries anything."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tiny import backward, batches, cross_entropy, listened_to, mlp, train
from torch_thor import THOR, ThorMuon

STREAM = batches(5)


class Heads(nn.Module):
    """Three heads; each step uses a single head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x, task):
        return self.heads[task](self.body(x).tanh())


@pytest.mark.parametrize("make", [THOR, ThorMuon])
@pytest.mark.parametrize("interval", [6, 10])
def test_layers_that_are_used_in_turn_get_factors(make, interval):
    """Also where the interval is a multiple of the turns, so that refreshes never see some."""
    model = Heads().double()
    every = {"trace_thresholds": (0.0, 0.0)} if make is THOR else {}
    optimizer = make(model, update_interval=interval, **every)
    for step, (x, labels) in enumerate(batches(40)):
        cross_entropy(labels)(model(x, step % 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    refreshes = {name: layer.refreshes for name, layer in optimizer.curvature.items()}
    assert all(count >= 40 // interval - 1 for count in refreshes.values()), refreshes


@pytest.mark.parametrize("refresh", [False, True])
def test_activations_die_as_they_do_without_us(refresh):
    """The backward pass frees them; on a refresh, the step does."""
    model, seen = mlp(), []
    optimizer = THOR(model, update_interval=1 if refresh else 100)
    train(model, optimizer, STREAM[:1])
    for i in (2, 4):
        model[i].register_forward_hook(
            lambda _m, inputs, output: seen.extend(map(weakref.ref, (*inputs, output)))
        )
    output = model(STREAM[1][0])
    assert all(seen[i]() is not None for i in (0, 3)), "the watch itself does not work"
    del output
    gc.collect()
    assert all(reference() is None for reference in seen)
    backward(model, STREAM[1])
    if refresh:
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 8
    assert all(reference() is None for reference in seen)


def test_the_model_and_its_copies_are_the_bare_model():
    """While THOR waits and afterwards; nobody hears the passes of a copy."""
    model = nn.Sequential(nn.Linear(5, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 3))
    bare = copy.deepcopy(model)
    optimizer = THOR(model)
    assert listened_to(model) == {"0", "1", "2"}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    twins = [copy.deepcopy(model), loaded, AveragedModel(model).module]
    assert not any(listened_to(twin) for twin in twins)
    x = model[0](torch.randn(2, 5))
    model[2](model[1](x, x, x)[0]).sum().backward()
    optimizer.step()
    for each in (model, *twins):
        for module, plain in zip(each.modules(), bare.modules(), strict=True):
            assert type(module) is type(plain)
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert vars(module).keys() == vars(plain).keys()
