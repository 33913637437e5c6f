"""Parameter groups by name and by depth."""

import pytest
from torch import nn

from torch_thor import param_groups


def names(groups, model, key="weight_decay"):
    """Return the names of the parameters by the value of an option of their groups."""
    left = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for group in groups:
        found.setdefault(group.get(key), set()).update(left.pop(id(p)) for p in group["params"])
    assert not any(model.get_parameter(name).requires_grad for name in left.values())
    return found


class Model(nn.Module):
    """An embedding, numbered blocks, a frozen layer, and a head with the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(2)
        )
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight


def test_biases_norms_and_the_parameters_of_no_decay_are_not_decayed():
    model = Model()
    matrices = {"embed.weight", "blocks.0.0.weight", "blocks.1.0.weight"}
    for no_decay, excluded in (
        ((), set()),
        (["blocks.0", "*.bias"], {"blocks.0.0.weight"}),
        ("blocks", {"blocks.0.0.weight", "blocks.1.0.weight"}),
    ):
        found = names(param_groups(model, weight_decay=0.3, no_decay=no_decay), model)
        assert found[0.3] == matrices - excluded


@pytest.mark.parametrize(("lr", "key"), [(0.8, "lr"), (None, "lr_scale")])
def test_the_learning_rate_falls_from_block_to_block(lr, key):
    """The last block has the full rate. Without lr, timm's schedulers read the factor."""
    model = Model()
    found = names(param_groups(model, lr=lr, layer_decay=0.5), model, key)
    shares = {"embed": 0.125, "blocks.0": 0.25, "blocks.1": 0.5, "head": 1.0}
    for value, members in found.items():
        for name in members:
            [share] = [shares[block] for block in shares if name.startswith(block)]
            assert value == share * (lr or 1)
    assert not any("lr" in group or "lr_scale" in group for group in param_groups(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_decay": "nosuch"}, "no_decay: 'nosuch' matches no parameter.*embed.weight"),
        ({"layer_decay": 1.5}, r"layer_decay=1.5.*\(0, 1\]"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Model(), **options)
