"""A weight that is pruned or parametrised after THOR was made: said once, trained plainly, later
taken up again.
"""

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from tiny import assert_same, batches, mlp, told, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(9)


CHANGES = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.4),
    "spectral_norm": parametrizations.spectral_norm,
}


def build(optimizer=THOR, **options):
    torch.manual_seed(0)
    model = mlp()
    return model, optimizer(model, **{"update_interval": 3, **options})


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
@pytest.mark.parametrize("change", CHANGES)
def test_said_once_and_trained_plainly(change, optimizer):
    """Whether it happens before the first step, an ordinary step, a refresh step, or after a
    refresh.
    """
    for steps in (0, 1, 3, 4):
        model, one = build(optimizer)
        train(model, one, STREAM[:steps])
        CHANGES[change](model[2])
        with pytest.raises(
            RuntimeError, match=r"(?s)'weight' of .*Linear.*pruned or parametrised|no factors yet"
        ):
            one.curvature["2"].factors()
        entries = {entry.name: entry for entry in one.coverage()}
        assert list(entries) == [name for name, _ in model.named_parameters()]
        assert not any(
            entry.preconditioned for name, entry in entries.items() if name.startswith("2.")
        )
        before = weights(model)
        (message,) = told(train, model, one, STREAM[steps:])
        assert "'2'" in message
        assert "pruned or parametrised" in message
        assert all(not torch.equal(before[name], value) for name, value in weights(model).items())
        assert set(one.curvature) == {"0", "4"}
        assert all(curvature.refreshes >= 2 for curvature in one.curvature.values())
        assert "in 2 layers" in repr(one)


def test_taken_up_again():
    """`prune.remove` gives the weight back, and with it the layer, its inverses and its
    refreshes.
    """
    for steps in (1, 2, 3):
        model, optimizer = build()
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
        assert {entry.name for entry in optimizer.coverage()} == {
            name for name, _ in model.named_parameters()
        }
        assert all(entry.preconditioned for entry in optimizer.coverage())


def test_all_layers_pruned_is_the_documented_error():
    model, optimizer = build()
    for i in (0, 2, 4):
        prune.l1_unstructured(model[i], "weight", 0.4)
    before = weights(model)
    with pytest.raises(ValueError, match=r"no layer to precondition.*SGD"):
        train(model, optimizer, STREAM[:1])
    assert_same(weights(model), before)
