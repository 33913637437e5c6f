"""What a unit is to adaptive gradient clipping: the weights of one output, and where they lie in a parameter.

A parameter is seen as a matrix ``(units, numbers of a unit)``:

- two and more dimensions: a unit is an index of dim 0, where PyTorch has the outputs of linear layers and convolutions;
- weights of transposed convolutions and of Hugging Face's ``Conv1D``, which have the inputs there: an index of dim 1
  (with groups: of a group and dim 1);
- one dimension or none (biases, gains of norms): the whole parameter is one unit, as in the authors' own code. Number
  by number, one that starts at zero could only creep.

An embedding's unit is a token. A gain of shape ``(C, 1, 1, 1)`` is C units.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.curvature.kinds import is_hugging_face_conv1d

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# Small tensors are looked at together, to save launches; a large one alone is no slower, and need not be copied.
_NUMBERS_AT_A_TIME = 2**22


@dataclass(frozen=True)
class UnitLayout:
    """Where the units of a parameter lie.

    Args:
        inputs_first: whether dim 0 has the inputs and dim 1 the outputs of a group.
        groups: of a transposed convolution: dim 0 has theirs one after the other.
    """

    inputs_first: bool = False
    groups: int = 1

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a parameter or its gradient, a unit a row.

        Args:
            tensor: of the parameter's shape.

        Returns:
            ``(units, numbers of a unit)``; complex numbers as pairs of real ones.
        """
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
            if tensor.dim() == 2:
                return tensor.reshape(1, -1)
        if tensor.dim() <= 1:
            return tensor.reshape(1, -1)
        if self.inputs_first:
            tensor = tensor.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return tensor.flatten(1)

    def spread(self, values: Tensor, parameter: Tensor) -> Tensor:
        """Turn one number a unit into what multiplies the parameter.

        Args:
            values: ``(units,)``, in the order of :meth:`rows`.
            parameter: the parameter, or its gradient.

        Returns:
            A tensor that broadcasts against the parameter.
        """
        if parameter.dim() <= 1:
            return values.reshape(())
        if self.inputs_first:
            by_group = values.reshape(self.groups, 1, -1)
            values = by_group.expand(-1, parameter.shape[0] // self.groups, -1).flatten(0, 1)
        return values.reshape(*values.shape, *[1] * (parameter.dim() - values.dim()))


ROWS = UnitLayout()


def layouts_of(model: nn.Module) -> dict[int, UnitLayout]:
    """Find the parameters whose outputs are not in dim 0.

    Args:
        model: the model.

    Returns:
        Their layouts, by ``id``.
    """
    found = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if isinstance(module, _TRANSPOSED):
            found[id(weight)] = UnitLayout(inputs_first=True, groups=module.groups)
        elif is_hugging_face_conv1d(module):
            found[id(weight)] = UnitLayout(inputs_first=True)
    return found


def last_linear(model: nn.Module) -> nn.Linear | None:
    """Find the last fully connected layer, which AGC leaves alone.

    Args:
        model: the model.

    Returns:
        The ``nn.Linear`` that was registered last, which is the classifier in the models of torchvision, timm and
        transformers; None where there is none.
    """
    found = None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found = module
    return found


@dataclass
class Clippable:
    """A parameter that may be clipped.

    Args:
        parameter: the parameter, not empty.
        gradient: its gradient.
        layout: where its units lie.
    """

    parameter: Tensor
    gradient: Tensor
    layout: UnitLayout


def unit_norms(entries: list[Clippable], *, together: bool) -> Iterator[tuple[list[int], list[int], Tensor, Tensor]]:
    """Measure every unit of every parameter, many parameters at a time.

    Args:
        entries: the parameters.
        together: whether those of one device, dtype and unit size are measured in one go.

    Yields:
        Positions in ``entries``; their numbers of units; the Frobenius norms of the weights and of the gradients,
        ``(all their units,)`` each, in float32 or, for parameters that have it, float64.
    """
    for positions in _batches(entries) if together else ([i] for i in range(len(entries))):
        rows = [(e.layout.rows(e.parameter), e.layout.rows(e.gradient)) for e in (entries[i] for i in positions)]
        norms = []
        for matrices in zip(*rows, strict=True):
            matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
            dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
            norms.append(torch.linalg.vector_norm(matrix, dim=1, dtype=dtype))
        yield positions, [len(weight) for weight, _ in rows], norms[0], norms[1]


def _batches(entries: list[Clippable]) -> Iterator[list[int]]:
    waiting: dict[tuple[object, ...], list[int]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    for i, entry in enumerate(entries):
        p, g = entry.parameter, entry.gradient
        if type(g) is not Tensor:  # a DTensor, say: what its rows are on this rank is its own affair
            yield [i]
            continue
        units = 1 if p.dim() <= 1 else p.shape[1] * entry.layout.groups if entry.layout.inputs_first else p.shape[0]
        key = (p.device, p.dtype, g.dtype, p.numel() // units)
        if key in waiting and sizes[key] + p.numel() > _NUMBERS_AT_A_TIME:
            yield waiting.pop(key)
        if key not in waiting:
            waiting[key], sizes[key] = [], 0
        waiting[key].append(i)
        sizes[key] += p.numel()
    yield from waiting.values()
