"""The recurrence of recurrent layers, computed step by step, because torch's fused kernels give no gradient of a gate.

On a step that gathers statistics, what ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells compute is computed step by
step, with the projections of the input and of the hidden state as linear layers. This holds for any number of layers
and directions, for output projections (``proj_size``) and for packed sequences. The numbers are equal except for the
order of rounding. Dropout between layers draws the same masks on a CPU; on a GPU cuDNN uses a generator of its own, so
the masks differ.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ReportCall = Callable[[str, int, Tensor, Tensor], None]
Cell = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


class RecurrenceMode(TorchFunctionMode):
    """While it is active, recurrent functions run step by step."""

    def __init__(self, names: Sequence[str], report: ReportCall) -> None:
        super().__init__()
        self._names = list(names)
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute recurrent functions step by step; call every other function as it is."""
        name = getattr(func, "__name__", "")
        cell = _CELLS.get(name.removesuffix("_cell"))
        if cell is None:
            return func(*args, **(kwargs or {}))
        device = args[0].device.type
        run = self._one_step if name.endswith("_cell") else self._sequences
        if not torch.is_autocast_enabled(device) or (device == "cpu" and name != "lstm"):
            return run(cell, *args)
        # autocast runs these functions as a whole in its dtype; all others operation by operation, as happens here too
        with torch.autocast(device, enabled=False):
            return run(cell, *_cast(args, torch.get_autocast_dtype(device)))

    def _one_step(
        self,
        cell: Cell,
        x: Tensor,
        state: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        states = list(state) if isinstance(state, tuple | list) else [state]
        from_input, from_hidden = F.linear(x, w_ih, b_ih), F.linear(states[0], w_hh, b_hh)
        self._report("weight_ih", len(x), x, from_input)
        self._report("weight_hh", len(x), states[0], from_hidden)
        new = cell(from_input, from_hidden, states)
        return new if len(new) > 1 else new[0]

    def _sequences(self, cell: Cell, *args: Any) -> tuple[Tensor, ...]:
        # the arguments are data, batch_sizes, state, weights, ... for packed sequences, else x, state, weights, ...
        packed = isinstance(args[3], list | tuple)
        x, sizes, state, flat, *options = args if packed else (args[0], None, *args[1:])
        has_bias, layers, dropout, training, bidirectional = options[:5]
        batch_first = not packed and bool(options[5])
        directions = 2 if bidirectional else 1
        states = list(state) if isinstance(state, tuple | list) else [state]
        if not packed and not batch_first:
            x = x.transpose(0, 1)
        counts = sizes.tolist() if packed else None
        size = len(flat) // (layers * directions)
        finals = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                mine = slice(place * size, (place + 1) * size)
                start = [one[place] for one in states]
                run = _Run(self._names[mine], flat[mine], has_bias, self._report)
                y, final = run.over(cell, x, counts, start, backwards=direction == 1)
                outputs.append(y)
                finals.append(final)
            x = torch.cat(outputs, -1)
            if dropout and layer < layers - 1:
                # drawn in the order of time, as the fused function draws it
                x = F.dropout(x, dropout, training) if packed else _drop(x, dropout, training)
        stacked = [torch.stack(one) for one in zip(*finals, strict=True)]
        return (x if packed or batch_first else x.transpose(0, 1), *stacked)


class _Run:
    """One layer of the recurrence in one direction."""

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor], has_bias: bool, report: ReportCall) -> None:
        self._names = names
        self._ih, self._hh = weights[:2]
        self._b_ih: Tensor | None = weights[2] if has_bias else None
        self._b_hh: Tensor | None = weights[3] if has_bias else None
        self._hr = weights[-1] if len(weights) % 2 else None
        self._trained = any(w.requires_grad for w in weights)
        self._report = report

    def over(
        self, cell: Cell, x: Tensor, counts: Sequence[int] | None, start: list[Tensor], *, backwards: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs, in the layout of ``x``, and the final states."""
        # packed rows are ordered by time step, the longest sequences first: counts[t] rows belong to step t
        per_step = [len(x)] * x.shape[1] if counts is None else list(counts)
        batch = len(x) if counts is None else per_step[0]
        gates = F.linear(x, self._ih, self._b_ih)
        self._report(self._names[0], batch, x, gates)
        inputs = gates.unbind(1) if counts is None else gates.split(per_step)
        hidden = _Probe(gates.shape, gates, per_step, self._trained)
        projected = None
        if self._hr is not None:
            projected = _Probe((*x.shape[:-1], len(self._hr)), gates, per_step, self._trained)
        states, outputs = start, [x] * len(per_step)
        for t in reversed(range(len(per_step))) if backwards else range(len(per_step)):
            n = per_step[t]
            now = [one[:n] for one in states]
            from_hidden = hidden.see(t, now[0], F.linear(now[0], self._hh, self._b_hh))
            new = list(cell(inputs[t], from_hidden, now))
            if projected is not None and self._hr is not None:
                new[0] = projected.see(t, new[0], F.linear(new[0], self._hr))
            outputs[t] = new[0]
            states = [torch.cat([a, b[n:]]) if n < len(b) else a for a, b in zip(new, states, strict=True)]
        for name, probe in ((self._names[1], hidden), (self._names[-1], projected)):
            if probe is not None:
                self._report(name, batch, probe.inputs(), probe.zeros)
        return (torch.stack(outputs, 1) if counts is None else torch.cat(outputs)), states


class _Probe:
    """Zeros that are added to the outputs of all time steps, so that one tensor receives all their gradients."""

    def __init__(self, shape: Sequence[int], like: Tensor, per_step: list[int], trained: bool) -> None:
        # the output of a frozen layer must not require a gradient because of these zeros
        self.zeros = torch.zeros(shape, dtype=like.dtype, device=like.device, requires_grad=trained)
        self._is_batch = len(shape) == 3
        self._steps = self.zeros.unbind(1) if self._is_batch else self.zeros.split(per_step)
        self._inputs = [like] * len(per_step)

    def see(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        """Record the input of a time step, and return its output with the zeros added."""
        self._inputs[t] = x.detach()
        return y + self._steps[t]

    def inputs(self) -> Tensor:
        """Return the inputs of all time steps, in the layout of the zeros."""
        return torch.stack(self._inputs, 1) if self._is_batch else torch.cat(self._inputs)


def _lstm(from_input: Tensor, from_hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    i, f, g, o = (from_input + from_hidden).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(from_input: Tensor, from_hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (r, z, n), (hidden_r, hidden_z, hidden_n) = from_input.chunk(3, -1), from_hidden.chunk(3, -1)
    new = (n + (r + hidden_r).sigmoid() * hidden_n).tanh()
    return (new + (z + hidden_z).sigmoid() * (states[0] - new),)


def _rnn_tanh(from_input: Tensor, from_hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((from_input + from_hidden).tanh(),)


def _rnn_relu(from_input: Tensor, from_hidden: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((from_input + from_hidden).relu(),)


_CELLS: Mapping[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}


def _drop(x: Tensor, dropout: float, training: bool) -> Tensor:
    return F.dropout(x.transpose(0, 1).contiguous(), dropout, training).transpose(0, 1)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with their floating-point tensors converted to a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(_cast(one, dtype) for one in value) if isinstance(value, list | tuple) else value
