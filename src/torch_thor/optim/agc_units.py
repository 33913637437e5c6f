"""The units of adaptive gradient clipping: the weights of one output, and their places in a parameter.

A parameter is treated as a matrix ``(units, elements of a unit)``:

- the weight of a layer that THOR has a kind for (:func:`torch_thor.register_kind`): a unit is a row of the matrix that
  the kind makes of the weight, which belongs to one output of the layer, whatever the memory layout of the weight is;
- any other parameter of two or more dimensions: a unit is an index of dim 0;
- a parameter of one dimension or none (biases, gains of normalisation layers): the whole parameter is one unit, as in
  the code of the authors. If every element were a unit, an element that starts at zero could hardly move.

A unit of an embedding is a token. A gain of shape ``(C, 1, 1, 1)`` has C units.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_thor.curvature.kinds import Kind, kind_of, parameter_names_of

# Transposed convolutions have a kind, unless a subclass overrides forward.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# The layouts of the kinds of this package, by class, shape and groups, because each call of the function needs them.
_of_geometry: dict[tuple[type, torch.Size, int], "UnitLayout"] = {}

# Small tensors are measured in batches of at most this many elements, to save kernel launches. A large tensor is
# measured alone, which is as fast and needs no copy.
_NUMBERS_AT_A_TIME = 2**22


@dataclass(frozen=True)
class UnitLayout:
    """The places of the units in a parameter."""

    inputs_first: bool = False  # whether dim 0 has the inputs and dim 1 the outputs of a group
    groups: int = 1  # the number of groups of a transposed convolution, whose inputs follow each other in dim 0
    kind: Kind | None = None  # makes matrices of the parameter, the rows of which are the units

    def count(self, tensor: Tensor) -> int:
        """Return the number of units."""
        if tensor.dim() <= 1:
            return 1
        if self.kind is not None:
            return self.kind.groups * self.kind.outputs
        return tensor.shape[1] * self.groups if self.inputs_first else tensor.shape[0]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a parameter or its gradient as a matrix with one unit per row."""
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
        """Turn one number per unit into a tensor that multiplies the parameter."""
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
    """Find the parameters whose outputs are not in dim 0."""
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
    """Return the layout of a weight that has a kind; one without the kind, which is cheaper, if that is the same."""
    if kind.diagonal_input:  # an embedding: a unit is a token
        return ROWS
    known = _of_geometry.get(key := (type(kind), weight.shape, kind.groups))
    if known is not None:
        return known
    tensor = torch.empty(weight.shape, device="meta")  # the strides are enough to tell
    matrix = kind.to_matrix(tensor)
    if matrix._base is not tensor or not matrix.is_contiguous():
        return UnitLayout(kind=kind)
    if not kind.transposed:
        layout = ROWS
    elif weight.dim() == 2 and kind.groups == 1:
        layout = UnitLayout(inputs_first=True)
    else:
        return UnitLayout(kind=kind)
    if type(kind).__module__.startswith("torch_thor."):  # the matrices of other kinds may depend on more than the key
        _of_geometry[key] = layout
    return layout


def last_linear(model: nn.Module) -> nn.Linear | None:
    """Find the last fully connected layer, which AGC does not clip."""
    found = None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found = module
    return found


@dataclass
class Clippable:
    """A parameter that may be clipped."""

    parameter: Tensor  # the parameter, not empty
    gradient: Tensor  # its gradient
    layout: UnitLayout  # the places of its units


def unit_norms(entries: list[Clippable], *, together: bool) -> Iterator[tuple[list[int], list[int], Tensor, Tensor]]:
    """Measure the norms of every unit of every parameter, in batches of parameters."""
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
        if type(g) is not Tensor:  # such as a DTensor, whose local rows are not known here
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
