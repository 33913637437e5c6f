"""Where a layer's matrices lie among the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from reference.rows import CALLED, TRANSPOSED, is_inputs_first, is_standardised, places


@dataclass
class Layer:
    """One layer: its weight (some rows of a parameter), its biases, and whose calls give its rows.

    `module` says how the weight lies in memory; None is a plain (out, in), or one of the matrices
    of a 3-d weight, (in, out) where `inputs_first`.
    """

    module: nn.Module | None
    weight: str
    rows: slice = field(default_factory=lambda: slice(None))
    biases: dict[str, slice] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    inputs_first: bool = False

    @property
    def input_split(self) -> int | None:
        """A of an embedding is diagonal whatever the split."""
        return 1 if isinstance(self.module, nn.Embedding) else None

    def matrices(self, tensor: np.ndarray) -> list[np.ndarray]:
        """(out, in) for each group; columns in the order of the rows of the input."""
        module = self.module
        if isinstance(module, nn.Embedding) or is_inputs_first(module):
            return [tensor.reshape(len(tensor), -1).T]
        if module is None and tensor.ndim == 3:
            return [tensor[0].T if self.inputs_first else tensor[0]]
        if not isinstance(module, TRANSPOSED):
            return np.split(tensor.reshape(len(tensor), -1), getattr(module, "groups", 1))
        found = []
        for group in np.split(tensor, module.groups):  # of input channels, which come first
            columns = [
                group[(channel, slice(None), *tap)]
                for channel in range(len(group))
                for tap in places(module.kernel_size)
            ]
            found.append(np.stack(columns, axis=1))
        return found

    def tensor(self, matrices: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """The way back: every number goes to the place from which `matrices` takes it."""
        found = np.zeros(shape)
        origins = self.matrices(np.arange(found.size).reshape(shape))
        for matrix, origin in zip(matrices, origins, strict=True):
            found.flat[origin] = matrix
        return found


def layers_of(
    model: nn.Module,
    names: Iterable[str] | None = None,
    pooled: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, Layer]:
    """The modules that are layers.

    `pooled` says which other modules, of the same weight, share a layer's rows.
    """
    modules = dict(model.named_modules())
    # a shared parameter has the first of its names
    known = {id(p): name for name, p in model.named_parameters()}
    pooled = pooled or {}
    others = {other for more in pooled.values() for other in more}
    if names is None:
        names = [
            name
            for name, module in modules.items()
            if (isinstance(module, CALLED) or is_inputs_first(module))
            and module.weight.requires_grad
            and name not in others
        ]
    layers = {}
    for name in names:
        calls = [name, *pooled.get(name, ())]
        biases = {
            known[id(modules[c].bias)]: slice(None)
            for c in calls
            if getattr(modules[c], "bias", None) is not None and not is_standardised(modules[c])
        }
        layers[name] = Layer(
            modules[name], known[id(modules[name].weight)], biases=biases, calls=calls
        )
    return layers
