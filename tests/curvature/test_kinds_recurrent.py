"""Recurrent layers: their rows are the loops'."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from comparing import compare
from reference import recurrent_layers, sequence_by_hand, step_by_hand
from tiny import assert_same, cross_entropy, train, weights
from torch_thor import THOR, ThorMuon


class Reader(nn.Module):
    """The last states, and the outputs' mean where no sequence is shorter than another."""

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
        return self.head(last if lengths is not None else last + output.mean(1 if self.rnn.batch_first else 0))


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


LAYERS = {"layers": lambda model: recurrent_layers(model, "rnn")}
MODELS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm_deep": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "lstm_projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bias=False),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "gru_deep": lambda: nn.GRU(3, 4, 2, bidirectional=True, bias=False),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", MODELS)
def test_steps(name):
    """Those of the loops, for a batch and for packed sequences."""
    for packed in (False, True):
        model = Reader(MODELS[name]()).double()
        options = {"forward": by_hand, "reference_options": LAYERS, "update_interval": 2, "split_dim": 5}
        optimizer, reference = compare(model, list(stream(6, packed=packed)), **options)
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
        y = nn.functional.linear(row, getattr(rnn, f"weight_{which}"), getattr(rnn, f"bias_{which}"))
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


@pytest.mark.parametrize("cell", [nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4, bias=False)], ids=repr)
def test_steps_of_a_cell(cell):
    model = Unrolled(cell).double()
    compare(model, list(stream(4)), forward=cell_by_hand, reference_options=LAYERS, update_interval=2)


def test_rows_and_terms():
    """N of a first layer: the batch, 1 for a sequence alone; a mask (N, L) holds for the rows of both projections."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for layer, shape, row_mask, expected in (
        (nn.GRU(3, 4), (6, 3), None, 6.0),
        (nn.GRU(3, 4), (6, 5, 3), None, 6.0),
        (nn.LSTM(3, 4, batch_first=True), (2, 3, 3), mask, 1.5),
    ):
        model = nn.Sequential(layer).double()
        optimizer = THOR(model, lr=0.0)
        optimizer.row_mask = row_mask
        layer(torch.randn(shape).double())[0].square().sum().backward()
        optimizer.step()
        assert {layer.rows_per_term for layer in optimizer.curvature.values()} == {expected}


class Other(nn.LSTM):
    """Another forward."""

    def forward(self, x):
        return super().forward(2 * x)


def test_coverage():
    model = nn.ModuleDict({"a": nn.LSTM(3, 4, proj_size=2), "b": nn.GRUCell(3, 4), "c": Other(3, 4)})
    entries = {e.name: e for e in THOR(model).coverage()}
    found = {name: (e.kind, e.factor_sizes) for name, e in entries.items() if e.preconditioned}
    assert found == {
        "a.weight_ih_l0": ("LSTM", (3, 16)),
        "a.weight_hh_l0": ("LSTM", (2, 16)),
        "a.bias_ih_l0": ("LSTM", (16,)),
        "a.bias_hh_l0": ("LSTM", (16,)),
        "a.weight_hr_l0": ("LSTM", (4, 2)),
        "b.weight_ih": ("GRUCell", (3, 12)),
        "b.weight_hh": ("GRUCell", (4, 12)),
        "b.bias_ih": ("GRUCell", (12,)),
        "b.bias_hh": ("GRUCell", (12,)),
    }
    assert entries["c.weight_ih_l0"].reason == "Other overrides the forward of LSTM"


def test_evaluation_and_frozen_layers_are_as_without_thor():
    """On a refresh step an evaluation has the bits of the fused kernels; what is frozen needs no gradient."""
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 4, proj_size=2), "head": nn.Linear(2, 3)})
    x = torch.randn(5, 2, 3)
    with torch.no_grad():  # both times: with gradients torch may choose another kernel
        wanted = model["rnn"](x)[0]
        optimizer = THOR(model)
        assert torch.equal(model["rnn"](x)[0], wanted)
    assert not any(layer.statistics.rows for layer in optimizer.curvature.values())
    model["rnn"].requires_grad_(False)
    output = model["rnn"](x)[0]
    assert not output.requires_grad
    model["head"](output).square().sum().backward()
    optimizer.step()
    assert optimizer.curvature["head"].refreshes == 1


@pytest.mark.parametrize("kind", [THOR, ThorMuon])
def test_resume(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    batches = [(torch.randn(4, 5, 3), torch.randint(3, (4, 5))) for _ in range(6)]

    def trained(stream, start=None):
        torch.manual_seed(2)
        model = Model()
        optimizer = kind(model, update_interval=2, lr=0.01)
        for new, old in zip((model, optimizer), start or (), strict=False):
            new.load_state_dict(old.state_dict())
        train(model, optimizer, stream)
        return model, optimizer

    resumed, _ = trained(batches[3:], trained(batches[:3]))
    assert_same(weights(resumed), weights(trained(batches)[0]))
