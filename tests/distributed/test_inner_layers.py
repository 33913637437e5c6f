"""Experts and recurrent layers on several ranks, accumulating gradients, and with frozen weights among them."""

import pytest
import torch
from torch import nn

from joined import Experts, alone, assert_same_training, digest, parallel, share, stream, train


class Inner(nn.Module):
    """Words through experts, a recurrent layer of two directions, and a cell."""

    def __init__(self):
        super().__init__()
        self.tokens, self.experts = nn.Embedding(11, 8), Experts()
        self.rnn = nn.GRU(8, 4, batch_first=True, bidirectional=True)
        self.cell, self.head = nn.LSTMCell(8, 5), nn.Linear(5, 5)

    def forward(self, batch):
        words = batch[1]
        x = self.tokens(words)
        x = self.rnn(torch.tanh(x + self.experts(x, words)))[0]
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0])


def network():
    torch.manual_seed(3)
    return Inner().double()


def partly_frozen():
    model = network()
    for frozen in (model.experts.weight, model.rnn.weight_hh_l0):
        frozen.requires_grad_(False)
    return model


OPTIONS = {"update_interval": 2, "trace_thresholds": (0.0, 0.0)}
MADE = {"trained": network, "frozen": partly_frozen}


def both_ways(rank, world, made, micro):
    make, batches = MADE[made], list(stream(5))
    model, optimizer = parallel(rank, world, make=make, **OPTIONS)
    decisions = train(model, optimizer, [share(b, rank, world) for b in batches], micro=micro)
    twin, other = alone(make=make, **OPTIONS)
    wanted = train(twin, other, batches)
    assert_same_training((model, optimizer, decisions), (twin, other, wanted))
    return digest(model, optimizer)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("made", MADE)
def test_equals_one_process(run, made, micro):
    assert len(set(run(2, both_ways, made, micro))) == 1
