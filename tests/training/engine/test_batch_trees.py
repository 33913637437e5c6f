"""Batches that are trees of tensors, in parts."""

import torch

from torch_thor.training.engine.batch_trees import split_batch


def test_batches_are_split_as_trees():
    batch = {"a": torch.arange(5), "b": (torch.arange(10).view(5, 2), [torch.ones(5)])}
    parts = split_batch(batch, 2)
    assert [part["a"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert parts[1]["b"][0].tolist() == [[6, 7], [8, 9]]
    assert [len(part["b"][1][0]) for part in parts] == [3, 2]
    assert split_batch(torch.arange(2), 4)[1].tolist() == [1]  # a batch may be a tensor; parts are not empty
