"""``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells: one linear layer per weight.

The weights ``weight_ih_l0``, ``weight_hh_l0_reverse``, ``weight_hr_l0``, ... are linear layers on the input, the hidden
state and the unprojected output. The rows of each are those of all sequences and time steps, so T is the length of the
sequences, and the outputs of the first two are all gates together. A weight is the same at every time step, so its rows
depend on each other as the patches of a convolution do, and are treated in the same way.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from torch_thor.capture.composites.hook import CompositeHook, Report
from torch_thor.capture.composites.recurrence import RecurrenceMode
from torch_thor.capture.composites.registry import Composite, InnerLayer
from torch_thor.capture.watcher import first_argument
from torch_thor.curvature.kinds import ProjectionKind, SequenceCall, class_of
from torch_thor.curvature.parameter_view import ParameterView


def gate_layers(module: nn.Module) -> Iterator[InnerLayer]:
    """Yield the linear layers of a recurrent layer or cell, each with its bias."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("weight_") and parameter.dim() == 2:
            bias = name.replace("weight_", "bias_", 1)
            biases = [] if module._parameters.get(bias) is None else [ParameterView(module, bias)]
            kind = ProjectionKind(parameter, class_of(module).__name__)
            yield InnerLayer(name, kind, ParameterView(module, name), biases)


class RecurrentHook(CompositeHook):
    """The hook on a recurrent layer or cell: reports its linear layers."""

    def mode(self, report: Report) -> TorchFunctionMode:
        """Return the mode that computes the recurrence step by step."""

        def report_call(name: str, batch: int, x: Tensor, y: Tensor) -> None:
            self._report(report, name, batch, x, y, packed=x.dim() == 2 and self._is_sequence)

        return RecurrenceMode(getattr(self.module, "_flat_weights_names", ()), report_call)

    def count(self, report: Report, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Report the input, batch first, for every linear layer."""
        x = first_argument(self.module, args, kwargs)
        y = output[0] if isinstance(output, tuple) else output
        packed = isinstance(x, PackedSequence)
        if packed:
            batch, x, y = int(x.batch_sizes[0]), x.data, y.data
        elif x.dim() == (2 if self._is_sequence else 1):
            batch, x = 1, x[None]
        elif self._is_sequence and not self.module.batch_first:
            batch, x = x.shape[1], x.transpose(0, 1)
        else:
            batch = len(x)
        for name in self.by_name:
            self._report(report, name, batch, x, y, packed=packed)

    @property
    def _is_sequence(self) -> bool:
        return isinstance(self.module, nn.RNNBase)

    def _report(self, report: Report, name: str, batch: int, x: Tensor, y: Tensor, *, packed: bool) -> None:
        if name in self.by_name:
            kind = self.by_name[name].kind
            assert isinstance(kind, ProjectionKind)
            report(name, x, y, SequenceCall(kind, batch, packed=packed))


RECURRENT = Composite(gate_layers, RecurrentHook)
