"""What an optimizer knows of a model: its layers, and its parameters' names, places and shards.

Layers of the plan before keep the statistics of the running step; new layers gather from the next
step on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from torch_thor.capture.coverage import Covered, covered
from torch_thor.capture.hooks import ModuleHook
from torch_thor.capture.inspection import Owner, hooks_of, inspect
from torch_thor.capture.patterns import Patterns
from torch_thor.capture.sharding import device_of_mesh, is_sharded, row_shards_of
from torch_thor.curvature.geometry import Geometry
from torch_thor.curvature.layer import Layer, LayerCurvature
from torch_thor.curvature.view import ParameterView, RowShards
from torch_thor.optim.projections import RowSplit, RowSplits, plain_matrices, row_splits_of


@dataclass(frozen=True)
class Form:
    """What a class of optimizers needs of the curvature, and what an optimizer was made with."""

    plain: str  # how it trains what has no factors and is no matrix, in words
    matrix: str | None = None  # a matrix without factors; None if as all else
    factor_names: tuple[str, ...] = ("A", "G")  # the factors that are used: these or ("A",)
    # whether the damping is relative to the mean diagonal of a factor
    relative_damping: bool = False
    orthogonalises: bool = False  # whether whole matrices can be asked for
    # of one optimizer: its class, for messages
    optimizer: type = torch.optim.Optimizer
    loss_reduction: str = "mean"
    fisher: str = "empirical"
    row_splits: RowSplits = None  # the option

    @cached_property
    def has_g(self) -> bool:
        """Whether G is used beside A, so that gradients of outputs are needed."""
        return "G" in self.factor_names


class Plan:
    """What is known of a model: its layers, and each parameter's name, place and shards.

    It is never changed.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[nn.Parameter],
        form: Form,
        chosen: Patterns,
        before: "Plan | None" = None,
    ) -> None:
        self.model, self._form = model, form
        inspection = inspect(model, trained, chosen=chosen, inputs_alone=not form.has_g)
        matrices = {} if form.matrix is None else plain_matrices(model, inspection)
        self.entries: tuple[Covered, ...] = tuple(
            covered(model, inspection, form.plain, form.matrix, matrices)
        )
        self._take_parameters(inspection.owners)
        self._check_present(trained)
        known = {} if before is None else before.layers
        self.layers: dict[str, LayerCurvature] = {
            name: self._curvature_of(layer, known.get(name))
            for name, layer in inspection.layers.items()
        }
        self.hooks: tuple[ModuleHook, ...] = tuple(hooks_of(inspection.layers, self.layers))
        # parameters that are matrices without factors, by id
        self.matrix_of: dict[int, Geometry] = {
            key: matrices[name] for key, name in self.names.items() if name in matrices
        }
        # parameters that are several projections in one, by id
        self.row_splits: dict[int, RowSplit] = {}
        if form.orthogonalises:
            orthogonalised = dict(self.matrix_of)
            for layer in self.layers.values():
                if layer.weight_view.rows is None:
                    orthogonalised[id(self.parameter_of(layer.weight_view))] = layer.kind.geometry
            self.row_splits = row_splits_of(
                model, form.row_splits, orthogonalised, inspection.owners
            )

    def _take_parameters(self, owners: Mapping[int, Sequence[Owner]]) -> None:
        """Note the name and the places of each parameter, and how its rows are divided."""
        named = dict(self.model.named_parameters())
        self.names = {id(parameter): name for name, parameter in named.items()}
        # the place of each parameter in the model
        self.order = {key: i for i, key in enumerate(self.names)}
        # the module that holds each parameter first, and its name there
        self.attributes = [(self.names[key], owners[key][0]) for key in self.names]
        # the parameter of each place: FSDP2 replaces those of modules while they run
        self.places: dict[tuple[int, str], nn.Parameter] = {
            (id(owner.module), owner.attribute): parameter
            for parameter in named.values()
            for owner in owners[id(parameter)]
        }
        # parameters that are DTensors, and how their rows are divided, by name
        self.sharded: dict[str, tuple[nn.Parameter, RowShards | None]] = {
            name: (parameter, row_shards_of(parameter))
            for name, parameter in named.items()
            if is_sharded(parameter)
        }
        # of those that are divided, by id
        self.shards = {id(p): s for p, s in self.sharded.values() if s is not None}
        self.first_shards = next(iter(self.shards.values()), None)

    def _curvature_of(self, layer: Layer, before: LayerCurvature | None) -> LayerCurvature:
        """Return the curvature of a layer, which stays if the layer of the plan before is this."""
        if before is not None:
            # It must have the same weight, divided in the same way.
            old, new = before.weight_view, layer.weight
            is_same = (old.module, old.attribute, old.rows) == (new.module, new.attribute, new.rows)
            has_biases = len(before.layer.biases) == len(layer.biases)
            if is_same and has_biases and old.shards == self.shards.get(id(new.parameter)):
                return before
        return LayerCurvature(layer, self._form.factor_names)

    def _check_present(self, trained: Sequence[nn.Parameter]) -> None:
        """Raise an error if groups hold nothing of the model."""
        if trained and not any(id(p) in self.names for p in trained):
            raise RuntimeError(
                f"parameter {next(iter(self.names.values()))!r} is in none of the optimizer's "
                "parameter groups, and so are all others: they were replaced after the optimizer "
                "was made. Make it after that (after fully_shard, which replaces all parameters), "
                "or assign to parameter.data instead. DeepSpeed replaces them too"
            )

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model; of sharded parameters, the device for collectives."""
        for parameter, _ in self.sharded.values():
            return device_of_mesh(parameter)
        weights = [layer.weight for layer in self.layers.values()] or [*self.model.parameters()]
        return next((weight for weight in weights if not weight.is_meta), weights[0]).device

    def parameter_of(self, view: ParameterView) -> nn.Parameter:
        """Return the parameter of which a view shows all rows or some."""
        return self.places[id(view.module), view.attribute]

    def name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the model."""
        return self.names.get(id(parameter), f"<parameter of shape {tuple(parameter.shape)}>")
