"""Recurrent layers: their rows are the loops'."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from comparing import compare
from reference import recurrent_layers, sequence_by_hand, step_by_hand
from tiny import cross_entropy
from torch_thor import THOR


class Reader(nn.Module):
    """The last states; for sequences of one length the mean of the outputs is added."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.directions = rnn, 2 if rnn.bidirectional else 1
        self.head = nn.Linear((rnn.proj_size or rnn.hidden_size) * self.directions, 3)

    def forward(self, x, lengths=None):
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        elif not self.rnn.batch_first:
            x = x.transpose(0, 1)
        output, states = self.rnn(x)
        h = states[0] if isinstance(states, tuple) else states
        last = torch.cat(list(h[-self.directions :]), -1)
        if lengths is None:
            last = last + output.mean(1 if self.rnn.batch_first else 0)
        return self.head(last)


def by_hand(model, x):
    x, lengths = x if isinstance(x, tuple) else (x, None)
    seen, rows = [], []
    for n, sequence in enumerate(x):
        cut = sequence if lengths is None else sequence[: lengths[n]]
        outputs, last, more = sequence_by_hand(model.rnn, "rnn", cut)
        seen += more
        rows.append(last if lengths is not None else last + outputs.mean(0))
    h = torch.stack(rows)
    y = model.head(h)
    return y, [*seen, ("head", h, y)]


def stream(count, *, packed=False):
    for _ in range(count):
        x = torch.randn(4, 5, 3).double()
        lengths = torch.tensor([2, 5, 1, 4])
        yield (x, lengths) if packed else x, cross_entropy(torch.randint(3, (4,)))


MODELS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm_deep": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "lstm_projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bias=False),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "gru_deep": lambda: nn.GRU(3, 4, 2, bidirectional=True, bias=False),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


OPTIONS = {
    "reference_options": {"layers": lambda model: recurrent_layers(model, "rnn")},
    "update_interval": 2,
}


@pytest.mark.parametrize("name", MODELS)
def test_steps(name):
    """Those of the loops, for a batch and for packed sequences."""
    for packed in (False, True):
        model, batches = Reader(MODELS[name]()).double(), stream(4, packed=packed)
        optimizer, reference = compare(model, batches, forward=by_hand, split_dim=5, **OPTIONS)
        assert set(optimizer.curvature) == set(reference.curvature)
        assert optimizer.curvature["rnn.weight_hh_l0"].rows_per_term == (3 if packed else 5)


class Unrolled(nn.Module):
    """A cell, called at every step."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(4, 3)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.rnn(x[:, t], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def cell_by_hand(model, x):
    rnn, seen, rows = model.rnn, [], []

    def product(which, row):
        weight, bias = (getattr(rnn, f"{name}_{which}") for name in ("weight", "bias"))
        y = nn.functional.linear(row, weight, bias)
        seen.append((f"rnn.weight_{which}", row, y))
        return y

    for sequence in x:
        states = [x.new_zeros(4), x.new_zeros(4)]
        for row in sequence:
            states = step_by_hand(rnn, row, states, product)
        rows.append(states[0])
    h = torch.stack(rows)
    y = model.head(h)
    return y, [*seen, ("head", h, y)]


def test_steps_of_a_cell():
    for cell in (nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4, bias=False)):
        compare(Unrolled(cell).double(), stream(4), forward=cell_by_hand, **OPTIONS)


def test_an_evaluation_on_a_refresh_step_has_the_bits_of_the_fused_kernels_and_no_rows():
    model, x = nn.Sequential(nn.LSTM(3, 4, proj_size=2)), torch.randn(5, 2, 3)
    with torch.no_grad():  # both times: with gradients torch may choose another kernel
        wanted = model(x)[0]
        optimizer = THOR(model, lr=0.0)
        assert torch.equal(model(x)[0], wanted)
    model(x)[0].square().sum().backward()
    optimizer.step()
    assert optimizer.curvature["0.weight_hh_l0"].rows_per_term == 5
