"""What a unit is to adaptive gradient clipping: the weights of one output, and where they lie in a parameter.

A parameter is seen as a matrix ``(units, numbers of a unit)``:

- weights of layers that THOR has a kind for (:func:`torch_thor.register_kind`): a unit is a row of the matrix that the
  kind makes of them, an output of the layer, wherever in the weight's memory that is;
- any other parameter of two and more dimensions: a unit is an index of dim 0;
- one dimension or none (biases, gains of norms): the whole parameter is one unit, as in the authors' own code. Number
  by number, one that starts at zero could only creep.

An embedding's unit is a token. A gain of shape ``(C, 1, 1, 1)`` is C units.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.curvature.kinds import Kind, kind_of, parameter_names_of

# Without a kind are those that override forward.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# What has been found of the kinds of this package, by class, shape and groups: it is asked for in each step.
_of_geometry: dict[tuple[type, torch.Size, int], "UnitLayout"] = {}

# Small tensors are looked at together, to save launches; a large one alone is no slower, and need not be copied.
_NUMBERS_AT_A_TIME = 2**22


@dataclass(frozen=True)
class UnitLayout:
    """Where the units of a parameter lie.

    Args:
        inputs_first: whether dim 0 has the inputs and dim 1 the outputs of a group.
        groups: of a transposed convolution: dim 0 has theirs one after the other.
        kind: makes matrices of the parameter, whose rows the units are; None where the dimensions say it.
    """

    inputs_first: bool = False
    groups: int = 1
    kind: Kind | None = None

    def count(self, tensor: Tensor) -> int:
        """Return the number of units.

        Args:
            tensor: of the parameter's shape.

        Returns:
            That number.
        """
        if tensor.dim() <= 1:
            return 1
        if self.kind is not None:
            return self.kind.groups * self.kind.outputs
        return tensor.shape[1] * self.groups if self.inputs_first else tensor.shape[0]

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
        if self.kind is not None:
            matrix = self.kind.to_matrix(tensor)
            return (matrix.mT if self.kind.transposed else matrix).flatten(0, 1)
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
        if self.kind is not None:
            spread = torch.empty_like(parameter, dtype=values.dtype, memory_format=torch.contiguous_format)
            matrix = self.kind.to_matrix(spread)
            by_output = values.reshape(self.kind.groups, -1, 1)
            matrix.copy_(by_output.mT if self.kind.transposed else by_output)
            self.kind.from_matrix_(matrix, spread)
            return spread
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
        weight = module._parameters.get(parameter_names_of(module)[0])
        if weight is None or weight.dim() < 2:
            continue
        kind = kind_of(module)
        layout = ROWS if kind is None else _layout_of(kind, weight)
        if kind is None and isinstance(module, _TRANSPOSED):
            layout = UnitLayout(inputs_first=True, groups=module.groups)
        if layout is not ROWS:
            found[id(weight)] = layout
    return found


def _layout_of(kind: Kind, weight: Tensor) -> UnitLayout:
    """Return the layout of a weight that has a kind: where its matrix is the weight as it lies, the cheaper ones."""
    if kind.diagonal_input:  # an embedding: a unit is a token, which is what is looked up
        return ROWS
    known = _of_geometry.get(key := (type(kind), weight.shape, kind.groups))
    if known is not None:
        return known
    tensor = torch.empty(weight.shape, device="meta")  # without memory: strides say it all
    matrix = kind.to_matrix(tensor)
    if matrix._base is not tensor or not matrix.is_contiguous():
        return UnitLayout(kind=kind)
    if not kind.transposed:
        layout = ROWS
    elif weight.dim() == 2 and kind.groups == 1:
        layout = UnitLayout(inputs_first=True)
    else:
        return UnitLayout(kind=kind)
    if type(kind).__module__.startswith("torch_thor."):  # others may go by more than this
        _of_geometry[key] = layout
    return layout


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
        key = (p.device, p.dtype, g.dtype, p.numel() // entry.layout.count(p))
        if key in waiting and sizes[key] + p.numel() > _NUMBERS_AT_A_TIME:
            yield waiting.pop(key)
        if key not in waiting:
            waiting[key], sizes[key] = [], 0
        waiting[key].append(i)
        sizes[key] += p.numel()
    yield from waiting.values()
