"""A weight that is pruned or parametrised after THOR was made: trained plainly, later taken up
again.
"""

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from tiny import batches, mlp, told, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(9)
CHANGES = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.4),
    "spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
@pytest.mark.parametrize("change", CHANGES)
# before the first step, an ordinary step, a refresh step, and after a refresh
@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_it_is_trained_plainly(optimizer, change, steps):
    model = mlp()
    one = optimizer(model, update_interval=3)
    train(model, one, STREAM[:steps])
    CHANGES[change](model[2])
    assert [e.name for e in one.coverage()] == [name for name, _ in model.named_parameters()]
    assert not any(e.preconditioned for e in one.coverage() if e.name.startswith("2."))
    before = weights(model)
    train(model, one, STREAM[steps:])
    assert all(not torch.equal(before[name], value) for name, value in weights(model).items())
    assert set(one.curvature) == {"0", "4"}
    assert all(curvature.refreshes >= 2 for curvature in one.curvature.values())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_taken_up_again(steps):
    """`prune.remove` gives the weight back, and with it the layer and its inverses."""
    model = mlp()
    optimizer = THOR(model, update_interval=3)
    train(model, optimizer, STREAM[:1])
    inverse = optimizer.curvature["2"].inverses()[0].clone()
    prune.l1_unstructured(model[2], "weight", 0.4)
    told(train, model, optimizer, STREAM[1 : 1 + steps])
    assert "2" not in optimizer.curvature
    prune.remove(model[2], "weight")
    assert not told(train, model, optimizer, STREAM[1 + steps : 2 + steps])
    assert torch.equal(optimizer.curvature["2"].inverses()[0], inverse)
    assert not told(train, model, optimizer, STREAM[2 + steps :])
    assert optimizer.curvature["2"].refreshes >= 2
    assert all(entry.preconditioned for entry in optimizer.coverage())
