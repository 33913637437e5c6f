"""Where the blocks of a factor are, as a value of the layer and its view."""

from dataclasses import replace

import torch
from torch import nn

from torch_thor.curvature import ParameterView
from torch_thor.curvature.kinds import kind_of
from torch_thor.curvature.layout import layout_of
from torch_thor.curvature.view import RowShards


def view_of(module, rows=None, split_dim=None, shards=None, most_rows=0):
    return ParameterView(
        module,
        "weight",
        rows,
        options={"split_dim": split_dim},
        shards=shards,
        divided=None if shards is None else module.weight,
        most_rows=most_rows or len(module.weight),
    )


def shards_of(bounds, process):
    own = slice(bounds[process], bounds[process + 1])
    return RowShards(len(bounds) - 1, bounds, own, process, None)


LAYER = nn.Linear(6, 10)
KIND = kind_of(LAYER)


def test_one_process_keeps_all_blocks():
    a, g = (layout_of(side, KIND, view_of(LAYER, split_dim=4), "q_") for side in "AG")
    assert (a.block_sizes.blocks, a.keys, a.shape) == (
        ((1, 4), (1, 2)),
        ("q_A", "q_A_inverse"),
        (6, 4),
    )
    # the rows of the weight are those of G, which other layers of the weight share
    assert (g.block_sizes.blocks, g.keys, g.shape) == (
        ((2, 4), (1, 2)),
        ("G", "G_inverse"),
        (10, 4),
    )
    assert (a.by_rows, g.by_rows) == (False, True)
    for layout in (a, g):
        assert (layout.local, layout.owners) == (layout.block_sizes, None)
    assert layout_of("A", KIND, view_of(LAYER, split_dim=4), "q_") == a


def test_rows_are_cut_at_shards_and_kept_by_who_has_them():
    bounds = (0, 5, 10)
    for process in (0, 1):
        view = view_of(LAYER, split_dim=3, shards=shards_of(bounds, process))
        a, g = (layout_of(side, KIND, view) for side in "AG")
        assert g.block_sizes.blocks == ((1, 3), (1, 2), (1, 3), (1, 2))
        assert g.local.blocks == ((1, 3), (1, 2))
        assert g.shape == (10, 3)  # those of all processes
        assert g.owners is not None
        assert (a.block_sizes, a.local, a.owners) == (a.local, a.block_sizes, None)
    # some rows of the weight: only the second process has any
    first, second = (
        layout_of(
            "G",
            kind_of(nn.Linear(6, 4)),
            view_of(LAYER, slice(6, 10), 3, shards_of(bounds, process)),
        )
        for process in (0, 1)
    )
    assert (first.local.rows, second.local.rows, second.block_sizes.blocks) == (
        0,
        4,
        ((1, 3), (1, 1)),
    )


def test_an_embedding_has_numbers_in_the_place_of_blocks():
    tokens = nn.Embedding(7, 3)
    a, g = (layout_of(side, kind_of(tokens), view_of(tokens, split_dim=2)) for side in "AG")
    assert (a.block_sizes.blocks, a.shape, a.by_rows) == (((7, 1),), (7, 1), True)
    assert (g.block_sizes.blocks, g.shape, g.by_rows) == (((1, 2), (1, 1)), (3, 2), False)


def test_the_present_split_dim_counts():
    options = {"split_dim": 3}
    view = replace(view_of(LAYER), options=options)
    assert layout_of("A", KIND, view).block_sizes.blocks == ((2, 3),)
    options["split_dim"] = None
    assert layout_of("A", KIND, view).block_sizes.blocks == ((1, 6),)


def test_a_view_that_is_bound_is_another_value():
    weight = ParameterView(LAYER, "weight", slice(6, 10))
    bound = replace(weight, state={"A": torch.ones(1)}, shards=shards_of((0, 5, 10), 1))
    assert (weight.state, weight.shards, weight.local_rows) == ({}, None, slice(6, 10))
    assert bound.local_rows == slice(1, 5)
    assert replace(bound, shards=shards_of((0, 5, 10), 0)).local_rows == slice(0, 0)
