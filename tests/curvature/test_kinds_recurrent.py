"""Recurrent layers: their rows are the loops'."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from comparing import compare
from reference import recurrent_layers, sequence_by_hand, step_by_hand
from tiny import assert_same, cross_entropy, train, weights
from torch_thor import THOR

# ------------------------------------------------------------------------------- steps


class Reader(nn.Module):
    """The last states, and the outputs' mean where no sequence is shorter than another."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn
        width = getattr(rnn, "proj_size", 0) or rnn.hidden_size
        self.directions = 2 if rnn.bidirectional else 1
        self.head = nn.Linear(width * self.directions, 3)

    def forward(self, x, lengths=None):
        if lengths is not None:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states = self.rnn(packed)[1]
            return self.head(self.last(states))
        output, states = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
        return self.head(self.last(states) + output.mean(1 if self.rnn.batch_first else 0))

    def last(self, states):
        h = states[0] if isinstance(states, tuple) else states
        return torch.cat(list(h[-self.directions :]), -1)


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


def layers(model):
    return {"layers": lambda model: recurrent_layers(model, "rnn")}


MODELS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "lstm_deep": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "lstm_projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bias=False),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "gru_deep": lambda: nn.GRU(3, 4, 2, bidirectional=True, bias=False),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_steps(name, packed):
    model = Reader(MODELS[name]()).double()
    optimizer, reference = compare(
        model,
        list(stream(6, packed=packed)),
        forward=by_hand,
        reference_options=layers(model),
        update_interval=2,
        split_dim=5,
    )
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
        y = getattr(rnn, f"weight_{which}") @ row
        bias = getattr(rnn, f"bias_{which}")
        y = y if bias is None else y + bias
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
    compare(model, list(stream(4)), forward=cell_by_hand, reference_options=layers(model), update_interval=2)


def test_rows_that_a_mask_leaves_out():
    """A mask (N, L) holds for the rows of both projections."""
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True)).double()
    optimizer = THOR(model, lr=0.0)
    optimizer.row_mask = torch.tensor([[True, True, False], [True, False, False]])
    model[0](torch.randn(2, 3, 3).double())[0].square().sum().backward()
    optimizer.step()
    assert {layer.rows_per_term for layer in optimizer.curvature.values()} == {1.5}


@pytest.mark.parametrize("x", [torch.randn(6, 3), torch.randn(6, 5, 3)], ids=["alone", "sequence_first"])
def test_terms_are_sequences(x):
    """N of a first layer: 1 sequence, or the second dimension."""
    model = nn.Sequential(nn.GRU(3, 4)).double()
    optimizer = THOR(model, lr=0.0)
    model[0](x.double())[0].square().sum().backward()
    optimizer.step()
    assert {layer.rows_per_term for layer in optimizer.curvature.values()} == {6.0}


# ------------------------------------------------------------------------------- what is and is not


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


def test_without_gradients_the_fused_function_runs():
    """An evaluation on a refresh step has the bits of the fused kernels, and leaves nothing behind."""
    model = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    with torch.no_grad():  # both times: with gradients torch may choose another kernel
        wanted = model(x)[0]
        optimizer = THOR(model)
        assert torch.equal(model(x)[0], wanted)
    assert not any(layer.statistics.rows for layer in optimizer.curvature.values())


def test_a_frozen_layer_needs_no_gradient():
    """What is computed in its place asks for none either."""
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 4, proj_size=2), "head": nn.Linear(2, 3)})
    model["rnn"].requires_grad_(False)
    optimizer = THOR(model)
    output = model["rnn"](torch.randn(5, 2, 3))[0]
    assert not output.requires_grad
    model["head"](output).square().sum().backward()
    optimizer.step()
    assert optimizer.curvature["head"].refreshes == 1


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_resume(scaling):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    batches = [(torch.randn(4, 5, 3), torch.randint(3, (4, 5))) for _ in range(6)]

    def fresh():
        torch.manual_seed(2)
        model = Model()
        return model, THOR(model, update_interval=2, lr=0.01, scaling=scaling)

    (whole, one), (first, two), (second, three) = fresh(), fresh(), fresh()
    train(whole, one, batches)
    train(first, two, batches[:3])
    second.load_state_dict(first.state_dict())
    three.load_state_dict(two.state_dict())
    train(second, three, batches[3:])
    assert_same(weights(second), weights(whole))
