"""State dicts of earlier versions, which held the factors of rows as blocks, and those of sharded trainings."""

import copy

import pytest
import torch
from torch import nn

from torch_thor import THOR
from torch_thor.optim.saved_rows import fit_loaded_rows

OPTIONS = {"update_interval": 2, "trace_thresholds": (0.0, 0.0), "split_dim": 4}


class Model(nn.Module):
    """Seven rows (a block and a tail), an embedding, and three layers that are rows of one weight."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rows = nn.Linear(6, 7)

    def forward(self, words):
        x = self.tokens(words)
        return self.rows(self.attention(x, x, x, need_weights=False)[0])


def made(**options):
    torch.manual_seed(0)
    model = Model().double()
    return model, THOR(model, **{**OPTIONS, **options})


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    for step in range(max(steps, default=0) + 1):
        words = torch.randint(9, (5, 3), generator=generator)
        if step in steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(words).mean(1), words[:, 0] % 7).backward()
            optimizer.step()


def of_an_earlier_version(model, optimizer):
    """Its state dict as version 0.1 saved it: blocks and tails, with a prefix for rows of one weight."""
    saved = copy.deepcopy(optimizer.state_dict())
    position = {id(parameter): i for i, parameter in enumerate(optimizer.param_groups[0]["params"])}
    for layer in optimizer.curvature.values():
        entries = saved["state"][position[id(layer.weight)]]
        side = layer.stored.side_by_rows
        for name in (side, f"{side}_inverse") if side else ():
            matrix = layer.stored.read(name)
            entries[layer.prefix + name] = matrix.blocks.clone()
            if matrix.tail is not None:
                entries[f"{layer.prefix}{name}_tail"] = matrix.tail.clone()
    for layer in optimizer.curvature.values():
        entries = saved["state"][position[id(layer.weight)]]
        entries.pop("row_shards", None)
        if layer.prefix and layer.stored.side_by_rows:
            for name in (layer.stored.side_by_rows, f"{layer.stored.side_by_rows}_inverse"):
                entries.pop(name, None)
    return saved


@pytest.mark.parametrize("stop", [0, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"split_dim": None}, {"scaling": "spectral"}], ids=["split", "whole", "spectral"]
)
def test_a_state_dict_of_an_earlier_version_is_loaded(options, stop):
    model, optimizer = made(**options)
    train(model, optimizer, range(stop))
    saved = of_an_earlier_version(model, optimizer) if stop else optimizer.state_dict()
    twin, other = made(**options)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    for (p, ours), (q, theirs) in zip(optimizer.state.items(), other.state.items(), strict=True):
        assert p.shape == q.shape
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]) if torch.is_tensor(value) else value == theirs[key], key
    train(model, optimizer, range(stop, 6))
    train(twin, other, range(stop, 6))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_blocks_of_other_sizes_are_refused():
    model, optimizer = made()
    train(model, optimizer, range(1))
    saved = of_an_earlier_version(model, optimizer)
    saved["param_groups"][0]["split_dim"] = 3
    _, other = made()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"layer 'tokens': .* has shape .* split_dim need"):
        other.load_state_dict(saved)
    assert str(other.state_dict()) == str(before)


def test_blocks_of_another_number_of_shards_are_cut_and_inverted_again():
    """Four shards of seven rows have two each; one process has blocks of four and of three rows."""
    model, optimizer = made()
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    rows = next(i for i, p in enumerate(optimizer.param_groups[0]["params"]) if p is model.rows.weight)
    entries = saved["state"][rows]
    old = torch.zeros(7, 4, dtype=torch.float64)
    for first in (0, 2, 4):
        block = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
        old[first : first + 2, :2] = block + first
    old[6, 0] = 3.0
    entries.update(row_shards=4, G=old.clone(), G_inverse=old.clone())
    twin, other = made()
    other.load_state_dict(saved)
    state = other.state[twin.rows.weight]
    assert state["row_shards"] == 1
    _, g = other.curvature["rows"].factors()
    _, inverse = other.curvature["rows"].inverses()
    whole = torch.block_diag(old[0:2, :2], old[2:4, :2], old[4:6, :2], old[6:7, :1])
    assert torch.equal(g, whole)
    layer = other.curvature["rows"]
    damping = (other.param_groups[0]["damping"] / layer.rows_per_term) ** 0.5
    torch.testing.assert_close(inverse, torch.linalg.inv(whole + damping * torch.eye(7, dtype=torch.float64)))


def test_blocks_that_cannot_be_inverted_are_refused_and_nothing_is_loaded():
    model, optimizer = made()
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    rows = next(i for i, p in enumerate(optimizer.param_groups[0]["params"]) if p is model.rows.weight)
    saved["state"][rows].update(row_shards=4, G=-100 * torch.ones(7, 4, dtype=torch.float64))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"layer 'rows': G was saved with 4 shards, and its blocks for 1 cannot be"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert torch.equal(after["state"][rows]["G"], before["state"][rows]["G"])
    assert after["state"][rows]["row_shards"] == 1


def test_state_of_no_layer_is_left_as_it_is():
    model, optimizer = made()
    states = {model.rows.bias: {"momentum_buffer": torch.ones(7)}}
    index = optimizer._registry.index
    fit_loaded_rows(states, optimizer.param_groups, index, relative=False)
    assert states[model.rows.bias].keys() == {"momentum_buffer"}
