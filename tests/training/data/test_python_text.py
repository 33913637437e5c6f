"""The text that every Python carries, and the windows of it that make a batch."""

import torch

from torch_thor.training.data import Shard, WindowOrder, characters
from torch_thor.training.data.python_text import python_text


def test_the_text_is_held_out_at_its_end():
    train, held_out = characters()
    text = python_text()
    assert len(train) == len(text) * 19 // 20
    assert "".join(map(chr, torch.cat([train, held_out]).tolist())) == text
    assert len(text) > 300_000
    assert text.isascii()


def test_windows_start_anywhere_and_are_other_ones_in_each_epoch():
    order = WindowOrder(40, 8, 3, positions=1000)
    epochs = [list(order.epoch(epoch)) for epoch in range(40)]
    assert {len(epoch) for epoch in epochs} == {5}
    starts = [start for epoch in epochs for batch in epoch for start in batch]
    assert (min(starts), max(starts)) == (0, 999)
    assert len(set(starts)) > 600  # of 1600 drawn from 1000
    assert epochs[0] != epochs[1]
    assert list(WindowOrder(40, 8, 4, positions=1000).epoch(0)) != epochs[0]
    assert list(order.epoch(7, start=2)) == epochs[7][2:]


def test_ranks_share_the_windows_of_one_process():
    alone = list(WindowOrder(40, 8, 3, positions=1000).epoch(1))
    shares = [list(WindowOrder(40, 8, 3, Shard(rank, 4), positions=1000).epoch(1)) for rank in range(4)]
    assert [[one for share in shares for one in share[batch]] for batch in range(5)] == alone
