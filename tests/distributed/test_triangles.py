"""Packed lower triangles give symmetric blocks back."""

import pytest
import torch

from torch_thor.distributed.triangles import pack, packed_size, unpack_


@pytest.mark.parametrize("size", [1, 2, 5])
def test_symmetric_blocks_come_back(size):
    blocks = torch.randn(3, size, size)
    blocks = blocks + blocks.mT
    packed = torch.full((3 * packed_size(size) + 1,), 7.0)
    pack(blocks, packed[:-1])
    assert packed[-1] == 7
    found = torch.full_like(blocks, torch.nan)
    unpack_(found, packed[:-1])
    assert torch.equal(found, blocks)


def test_the_lower_triangle_decides():
    blocks = torch.tensor([[[1.0, 9.0], [2.0, 3.0]]])
    packed = torch.empty(3)
    pack(blocks, packed)
    assert packed.tolist() == [1, 2, 3]
    unpack_(blocks, packed)
    assert blocks.tolist() == [[[1, 2], [2, 3]]]
