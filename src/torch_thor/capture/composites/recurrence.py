"""``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells, computed step by step.

Each weight is one linear layer.

The weights ``weight_ih_l0``, ``weight_hh_l0_reverse``, ``weight_hr_l0``, ... are linear layers on
the input, the hidden state and the unprojected output. The rows of each are those of all sequences
and time steps, so T is the length of the sequences, and the outputs of the first two are all gates
together. A weight is the same at every time step, so its rows depend on each other as the patches
of a convolution do, and are treated in the same way.

torch's fused kernels give no gradient of a gate. So on a step that gathers statistics, what these
modules compute is computed step by step, for any number of layers and directions, for output
projections (``proj_size``) and for packed sequences. The numbers are equal except for the order of
rounding. Dropout between layers draws the same masks on a CPU; on a GPU cuDNN uses a generator of
its own, so the masks differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.capture.composites.declarations import InnerLayer
from torch_thor.capture.hooks import CompositeHook, Report
from torch_thor.curvature.kinds import PackedCall, ProjectionKind, class_of
from torch_thor.curvature.view import ParameterView
from torch_thor.torch_internals import tree_map

# from the gates of the input, those of the hidden state, and the states: the new states
Cell = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


def gate_layers(module: nn.Module) -> Iterator[InnerLayer]:
    """Yield the linear layers of a recurrent layer or cell, each with its bias."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("weight_") and parameter.dim() == 2:
            kind = ProjectionKind(parameter, class_of(module).__name__)
            bias = ParameterView(module, name.replace("weight_", "bias_", 1))
            yield InnerLayer(name, kind, ParameterView(module, name), [bias])


class RecurrentHook(CompositeHook):
    """The hook on a recurrent layer or cell: reports its linear layers."""

    def call(
        self, report: Report, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Compute recurrent functions step by step; call every other function as it is."""
        name = getattr(func, "__name__", "")
        cell = _CELLS.get(name.removesuffix("_cell"))
        if cell is None:
            return func(*args, **kwargs)
        device = args[0].device.type
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        # Autocast runs these functions as a whole in its dtype. It would run the functions that
        # compute them here one by one, each in a dtype of its own.
        casts = casts and (device != "cpu" or name == "lstm")
        if casts:
            args = tree_map(partial(_cast, dtype=torch.get_autocast_dtype(device)), args)
        with torch.autocast(device, enabled=False) if casts else nullcontext():
            if name.endswith("_cell"):
                return _one_step(report, cell, *args)
            return _sequences(report, cell, getattr(self.module, "_flat_weights_names", ()), *args)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value


def _one_step(
    report: Report,
    cell: Cell,
    x: Tensor,
    state: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    """Return the new state of a cell, or its new states."""
    states = _listed(state)
    from_input, from_hidden = F.linear(x, w_ih, b_ih), F.linear(states[0], w_hh, b_hh)
    report("weight_ih", x, from_input)
    report("weight_hh", states[0], from_hidden)
    new = cell(from_input, from_hidden, states)
    return new if len(new) > 1 else new[0]


def _sequences(report: Report, cell: Cell, names: Sequence[str], *args: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a recurrent layer for sequences, and its final states.

    ``names`` are those of its parameters, in the order in which the function takes them.
    """
    # the arguments are data, batch_sizes, state, weights, ... for packed sequences, else x, state,
    # weights, ...
    packed = isinstance(args[3], list | tuple)
    x, sizes, state, flat, _, layers, dropout, training, bidirectional, *batch_first = (
        args if packed else (args[0], None, *args[1:])
    )
    time_first = not packed and not batch_first[0]
    if time_first:
        x = x.transpose(0, 1)
    steps = _Steps(x, sizes.tolist() if packed else None)
    directions = 2 if bidirectional else 1
    size = len(flat) // (layers * directions)
    weights = list(zip(names, flat, strict=True))
    finals = []
    for layer in range(layers):
        outputs = []
        for place in range(layer * directions, (layer + 1) * directions):
            of_place = dict(weights[place * size : (place + 1) * size])
            start = [tensor[place] for tensor in _listed(state)]
            backwards = place % directions == 1
            y, final = _direction(report, cell, x, steps, start, of_place, backwards=backwards)
            outputs.append(y)
            finals.append(final)
        x = torch.cat(outputs, -1)
        if dropout and layer < layers - 1:
            # drawn in the order of time, as the fused function draws it
            x = steps.in_time_order(F.dropout(steps.in_time_order(x), dropout, training))
    stacked = [torch.stack(states) for states in zip(*finals, strict=True)]
    return (x.transpose(0, 1) if time_first else x, *stacked)


def _direction(
    report: Report,
    cell: Cell,
    x: Tensor,
    steps: "_Steps",
    states: list[Tensor],
    weights: dict[str, Tensor],
    *,
    backwards: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of one layer in one direction, in the layout of ``x``, and its states."""

    def tell(name: str, x: Tensor, y: Tensor) -> None:
        packed = PackedCall(weights[name], name, steps.counts[0]) if steps.packed else None
        report(name, x, y, packed)

    names, (w_ih, w_hh, *rest) = list(weights), weights.values()
    b_ih, b_hh = rest[:2] if len(rest) > 1 else (None, None)
    w_hr = rest[-1] if len(rest) % 2 else None
    gates = F.linear(x, w_ih, b_ih)
    tell(names[0], x, gates)
    # Zeros are added to the outputs of all time steps, so that one tensor receives all their
    # gradients. The output of a frozen layer must not require a gradient because of them.
    trains = any(weight.requires_grad for weight in weights.values())
    of_hidden, of_output = (
        gates.new_zeros((*x.shape[:-1], width), requires_grad=trains)
        for width in (len(w_hh), 0 if w_hr is None else len(w_hr))
    )
    inputs, add_hidden, add_output = map(steps.split, (gates, of_hidden, of_output))
    hidden, unprojected, outputs = ([x] * len(inputs) for _ in range(3))
    for t in reversed(range(len(inputs))) if backwards else range(len(inputs)):
        n = steps.counts[t]
        now = [state[:n] for state in states]
        hidden[t] = now[0].detach()
        new = list(cell(inputs[t], F.linear(now[0], w_hh, b_hh) + add_hidden[t], now))
        if w_hr is not None:
            unprojected[t] = new[0].detach()
            new[0] = F.linear(new[0], w_hr) + add_output[t]
        outputs[t] = new[0]
        # the states of sequences that have ended stay as they are
        states = [
            torch.cat([a, b[n:]]) if n < len(b) else a for a, b in zip(new, states, strict=True)
        ]
    tell(names[1], steps.join(hidden), of_hidden)
    if w_hr is not None:
        tell(names[-1], steps.join(unprojected), of_output)
    return steps.join(outputs), states


class _Steps:
    """The time steps of a batch ``(N, L, ...)``, or of packed rows.

    Packed rows are ordered by time, the longest sequences first.
    """

    def __init__(self, x: Tensor, counts: list[int] | None) -> None:
        self.packed = counts is not None
        # the number of rows of each step
        self.counts = [len(x)] * x.shape[1] if counts is None else counts

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the rows of each step."""
        return rows.split(self.counts) if self.packed else rows.unbind(1)

    def join(self, rows: list[Tensor]) -> Tensor:
        """Return the rows of all steps, in the layout that was split."""
        return torch.cat(rows) if self.packed else torch.stack(rows, 1)

    def in_time_order(self, rows: Tensor) -> Tensor:
        """Return ``(L, N, ...)`` for a batch ``(N, L, ...)`` and the reverse; packed rows as is."""
        return rows if self.packed else rows.transpose(0, 1).contiguous()


def _lstm(from_input: Tensor, from_hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, g, o = (from_input + from_hidden).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(from_input: Tensor, from_hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (r, z, n), (hidden_r, hidden_z, hidden_n) = from_input.chunk(3, -1), from_hidden.chunk(3, -1)
    new = (n + (r + hidden_r).sigmoid() * hidden_n).tanh()
    return (new + (z + hidden_z).sigmoid() * (states[0] - new),)


_CELLS: Mapping[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda from_input, from_hidden, _: ((from_input + from_hidden).tanh(),),
    "rnn_relu": lambda from_input, from_hidden, _: ((from_input + from_hidden).relu(),),
}


def _listed(state: Any) -> list[Tensor]:
    return list(state) if isinstance(state, tuple | list) else [state]
