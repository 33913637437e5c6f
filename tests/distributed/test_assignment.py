"""Which process owns which blocks, and how evenly the work of an inversion is divided."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models import resnet50
from transformers import BertConfig, BertForPreTraining

from torch_thor import THOR
from torch_thor.distributed.assignment import assign, assign_matrices, cost, imbalance

SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), max_size=12)


@given(SHAPES, st.integers(1, 9))
def test_every_block_has_one_owner_and_work_differs_by_one_block_at_most(parts, processes):
    """When a process was given its last block, it had the least work of all."""
    bounds = assign(tuple(parts), processes)
    loads, last = [0] * processes, [0] * processes
    for (count, size), of_ranks in zip(parts, bounds, strict=True):
        assert (len(of_ranks), of_ranks[0], of_ranks[-1]) == (processes + 1, 0, count)
        assert list(of_ranks) == sorted(of_ranks)
        for rank in range(processes):
            own = of_ranks[rank + 1] - of_ranks[rank]
            loads[rank] += own * cost(size)
            last[rank] = max(last[rank], cost(size) if own else 0)
    assert max(load - its for load, its in zip(loads, last, strict=True)) <= min(loads)


@given(costs=st.lists(st.integers(1, 99), max_size=9), processes=st.integers(1, 5))
def test_every_matrix_has_one_owner_and_the_largest_come_first(costs, processes):
    found = assign_matrices(tuple(costs), processes)
    assert sorted(i for of_process in found for i in of_process) == list(range(len(costs)))
    # one process takes the first, the other the two next, and the last goes to the first
    assert assign_matrices((900, 500, 400, 100), 2) == ((0, 3), (1, 2))


@pytest.mark.parametrize("processes", [8, 16, 32, 64, 128, 256])
def test_large_models_are_divided_evenly(processes):
    with torch.device("meta"):
        sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
        models = {1.02: BertForPreTraining(BertConfig(num_hidden_layers=24, **sizes))}
        # ResNet-50 has 636 blocks of 128 rows: three for some of 256 processes, two for others
        if processes < 256:
            models[1.01] = resnet50()
    for most, model in models.items():
        factors = [factor for layer in THOR(model).curvature.values() for factor in layer.stored]
        blocks = [block for factor in factors for block in factor.layout.block_sizes.blocks]
        assert imbalance(blocks, processes) <= most
