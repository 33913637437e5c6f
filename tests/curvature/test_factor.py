"""The tensors of a factor in the state of its weight: whole, of rows of a weight, of shards, of divided curvature."""

import pytest
import torch
from torch import nn

from torch_thor.curvature import Blocks, Cut, LayerCurvature, LinearKind, ParameterView
from torch_thor.curvature.factor import collected
from torch_thor.curvature.kinds import kind_of
from torch_thor.curvature.shards import (
    Owners,
    RowShards,
    bounds_within,
    local,
    shard_bounds,
    side_of_rows,
    why_not_by_rows,
)

CPU = torch.device("cpu")


class Part:
    """A DTensor of rows: the part of this process, and the whole."""

    def __init__(self, own):
        self.own, self.whole = own, None

    def to_local(self):
        return self.own

    def full_tensor(self):
        return self.whole


def shards_of(rows, count, process):
    bounds = shard_bounds(rows, count)
    return RowShards(count, bounds, slice(bounds[process], bounds[process + 1]), process, None, None, Part)


def layer_of(module, state, *, split_dim=4, shards=None, rows=None, prefix="", kind=None, longest=None):
    view = ParameterView(module, "weight", rows)
    view.bind(state, {"split_dim": split_dim}, module.weight, shards)
    view.longest = longest or len(view.outline())
    return LayerCurvature("fc", kind or kind_of(module), view, [], prefix)


def second_moment(cut, seed=0):
    blocks = Blocks.zeros(cut, torch.float64, CPU)
    generator = torch.Generator().manual_seed(seed)
    shape = cut.groups, cut.rows // cut.groups, 3
    blocks.add_second_moment_(torch.randn(shape, generator=generator, dtype=torch.float64))
    return blocks


def write(factor, whole):
    """Write what a process holds of the blocks of all."""
    held = [part if factor.owners is None else part[factor.owners.held(i)] for i, part in enumerate(whole.parts)]
    for into, part in zip(factor.read().parts, [part for part in held if len(part)], strict=True):
        into.copy_(part)


# ---- which weights can be divided by rows ----------------------------------------------------------------------------

BY_ROWS = [
    nn.Linear(5, 3),
    nn.Conv1d(3, 4, 2),
    nn.Conv2d(3, 4, (2, 3)),
    nn.Conv3d(2, 2, 2),
    nn.Embedding(7, 3),
    nn.ConvTranspose1d(1, 1, 3),  # one row
]
NOT = [
    nn.Conv2d(4, 4, 2, groups=2),
    nn.Conv2d(4, 4, 2, groups=4),
    nn.ConvTranspose2d(4, 4, 2),  # as many inputs as outputs: one row of it could be either
    nn.ConvTranspose2d(4, 3, 2),
    nn.ConvTranspose1d(3, 1, 2),
    nn.ConvTranspose2d(4, 4, 2, groups=4),
]


def test_a_slice_of_a_weight_is_a_row_of_its_matrix():
    """The rule is compared with what it says: rows of the weight against rows of the matrix of the whole weight."""
    for module in BY_ROWS + NOT:
        kind, weight = kind_of(module), torch.arange(module.weight.numel()).view(module.weight.shape)
        rows = kind.to_matrix(weight)
        is_by_rows = rows.shape == (1, len(weight), weight[0].numel()) and torch.equal(rows[0], weight.flatten(1))
        assert is_by_rows is (module in BY_ROWS)
        assert (why_not_by_rows(kind, tuple(weight.shape)) is None) is is_by_rows
        side = "A" if isinstance(module, nn.Embedding) else "G"
        assert side_of_rows(kind) == side
        layer = layer_of(module, {})
        assert [factor.by_rows for factor in layer.stored] == [is_by_rows and side == one for one in layer.sides]


def test_rows_of_a_part():
    assert bounds_within((0, 4, 8, 12), None) == (0, 4, 8, 12)
    assert bounds_within((0, 4, 8, 12), slice(3, 9)) == (0, 1, 5, 6)
    assert bounds_within((0, 4, 8, 12), slice(8, 12)) == (0, 0, 0, 4)
    assert [shard_bounds(7, shards) for shards in (1, 3, 4)] == [(0, 7), (0, 3, 6, 7), (0, 2, 4, 6, 7)]
    tensor = nn.Parameter(torch.ones(2))
    assert local(tensor) is tensor


# ---- the tensors -----------------------------------------------------------------------------------------------------


def test_keys_and_shapes():
    """Of the side that belongs to the rows as many rows as the weight; split, grouped, diagonal."""
    for module, split_dim, shapes in (
        (nn.Linear(5, 3), 4, {"A": (5, 4), "G": (3, 3)}),
        (nn.Linear(5, 3), None, {"A": (5, 5), "G": (3, 3)}),
        (nn.Linear(5, 3), 1, {"A": (5, 1), "G": (3, 1)}),
        (nn.Embedding(7, 3), 2, {"A": (7, 1), "G": (3, 2)}),
        (nn.Conv2d(4, 6, 3, groups=2), 4, {"A": (36, 4), "G": (6, 3)}),
        (nn.ConvTranspose2d(4, 6, 2, groups=2), None, {"A": (16, 8), "G": (6, 3)}),
    ):
        state = {}
        layer = layer_of(module, state, split_dim=split_dim)
        assert layer.shapes() == {k: shape for key, shape in shapes.items() for k in (key, f"{key}_inverse")}
        layer.make_state()
        assert {key: tuple(state[key].shape) for key in layer.shapes()} == layer.shapes()
        assert layer.missing_entries() == []


def test_what_is_written_is_read():
    state = {}
    layer = layer_of(nn.Conv2d(4, 6, 3, groups=2, dtype=torch.float64), state)
    layer.make_state()
    for i, factor in enumerate(layer.stored):
        wanted = second_moment(factor.cut, i)
        factor.read(inverse=True).rows.copy_(wanted.rows)
        assert torch.equal(state[factor.key(True)], wanted.rows)
        assert torch.equal(torch.stack(factor.dense(inverse=True)), torch.stack(wanted.dense()))
        factor.prepare()
        assert torch.equal(factor.whole.rows, wanted.rows)


def test_layers_that_are_rows_of_one_weight_share_its_tensors():
    """Three projections of 4, 4 and 2 rows; the widest tells how many columns there are."""
    module, state = nn.Linear(5, 10, dtype=torch.float64), {}
    parts = {"q_": slice(0, 4), "k_": slice(4, 8), "v_": slice(8, 10)}
    layers = [
        layer_of(
            module, state, split_dim=3, rows=rows, prefix=prefix, longest=4,
            kind=LinearKind(nn.Linear(5, rows.stop - rows.start)),
        )
        for prefix, rows in parts.items()
    ]  # fmt: skip
    for layer in layers:
        layer.make_state()
        assert layer.shapes()["G"] == (10, 3)
        assert layer.shapes()[layer.prefix + "A"] == (5, 3)
    wanted = [second_moment(layer.stored[1].cut, i) for i, layer in enumerate(layers)]
    for layer, one in zip(layers, wanted, strict=True):
        write(layer.stored[1], one)
    for layer, one, rows in zip(layers, wanted, parts.values(), strict=True):
        assert torch.equal(layer.stored[1].dense(inverse=False)[0], one.dense()[0])
        assert torch.equal(state["G"][rows, : one.rows.shape[1]], one.rows)


# ---- shards of the weight --------------------------------------------------------------------------------------------


def test_shards_hold_the_rows_of_the_weight():
    """Blocks end at the shards; what processes hold, one below the other, is what one process would hold."""
    for module, side in ((nn.Linear(5, 7, dtype=torch.float64), 1), (nn.Embedding(7, 3, dtype=torch.float64), 0)):
        for split_dim, count in ((None, 3), (2, 3), (2, 4), (1, 2), (None, 8)):
            states = [{} for _ in range(count)]
            layers = [
                layer_of(module, state, split_dim=split_dim, shards=shards_of(7, count, r))
                for r, state in enumerate(states)
            ]
            bounds, factors = shard_bounds(7, count), [layer.stored[side] for layer in layers]
            cut, key = factors[0].cut, factors[0].key(False)
            assert cut == Cut.of(7, split_dim if side else 1, edges=bounds)
            whole = second_moment(cut)
            for r, (layer, factor) in enumerate(zip(layers, factors, strict=True)):
                layer.make_state()
                rows = bounds[r + 1] - bounds[r]
                assert (factor.held.rows, states[r][key].own.shape) == (rows, (rows, factor.width))
                write(factor, whole)
                other = layer.stored[1 - side]
                assert (other.owners, other.held, type(other.read().rows)) == (None, other.cut, torch.Tensor)
                assert layer.geometry.outputs + layer.geometry.inputs == sum(module.weight.shape) - 7 + rows
                assert layer.geometry is layer.geometry
            gathered = torch.cat([state[key].own for state in states])
            for state, factor in zip(states, factors, strict=True):
                state[key].whole = gathered
                assert torch.equal(factor.dense(inverse=False)[0], whole.dense()[0])


def test_every_block_of_a_shard_has_one_owner():
    for rows, count, split_dim in ((7, 3, None), (7, 3, 2), (12, 5, 3), (3, 5, None)):
        shards = shards_of(rows, count, 0)
        cut = Cut.of(rows, split_dim, edges=shards.bounds)
        owners = Owners.of_shards(cut, shards, None)
        for (n, _), of in zip(cut.blocks, owners.bounds, strict=True):
            assert (of[0], of[-1]) == (0, n)
            assert list(of) == sorted(of)
        for r in range(count):
            assert cut.held(owners.bounds, r).rows == shards.bounds[r + 1] - shards.bounds[r]


# ---- divided curvature -----------------------------------------------------------------------------------------------


class Exchange:
    """Puts together what processes hold, as the sum of what each of them has spread."""

    def __init__(self, spread):
        self.spread = spread

    def share_(self, parts, bounds):
        for i, part in enumerate(parts):
            part.copy_(sum(of_process[i] for of_process in self.spread))


@pytest.mark.parametrize("split_dim", [None, 2, 1])
def test_divided_factors_are_collected(split_dim):
    module, count = nn.Linear(7, 5, dtype=torch.float64), 3
    whole, processes = None, []
    for r in range(count):
        state = {}
        layer = layer_of(module, state, split_dim=split_dim)
        for factor in layer.stored:
            blocks = factor.cut.blocks
            factor.divided = Owners(tuple((0, n // 2, n // 2, n) for n, _ in blocks), r)
        layer.make_state()
        whole = whole or [second_moment(factor.cut) for factor in layer.stored]
        for factor, wanted in zip(layer.stored, whole, strict=True):
            assert factor.key(False) == factor.side
            assert factor.shapes()[factor.side] == (factor.held.rows, factor.cut.width)
            write(factor, wanted)
        processes.append(layer.stored)
    spread = [[p.clone() for f in factors for p in f.spread(inverse=False).parts] for factors in processes]
    for factors in processes:
        for factor in factors:
            factor.exchange = Exchange(spread)
        found = collected(factors, inverse=False)
        for one, wanted in zip(found, whole, strict=True):
            assert torch.equal(one.rows, wanted.rows)
