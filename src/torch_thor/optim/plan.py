"""A snapshot of the model's layers, and of each parameter's name, group, state, layers and shards.

Wrappers such as Accelerate put new parameters into modules and groups, users prune, freeze or
replace layers, and a state dict replaces the state. So every step compares a fingerprint of all
this with that of the plan, and makes the plan anew, as a whole, if they differ. The truth stays in
``optimizer.state`` and ``optimizer.param_groups``. Layers that are still there keep the statistics
of the running step; new ones gather from the next step on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.coverage import Covered
from torch_thor.capture.hooks import ModuleHook, hooks_of
from torch_thor.capture.inspection import Inspection
from torch_thor.capture.layers import Layer, owners_of
from torch_thor.capture.patterns import Patterns
from torch_thor.capture.sharding import device_of_mesh, is_sharded, row_shards_of
from torch_thor.curvature.factor import ParameterView
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.matrices import PlainMatrix
from torch_thor.curvature.shards import RowShards
from torch_thor.optim.parameters import Group, States


@dataclass(frozen=True)
class Share:
    """The share of a layer in a parameter."""

    layer: LayerCurvature
    view: ParameterView  # the parameter, or the rows of it that belong to the layer
    is_weight: bool  # whether it is the layer's weight; otherwise it is a bias


class Plan:
    """What an optimizer knows of its model, made at once; only ``fingerprint`` ever changes."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[Group],
        states: States,
        sides: tuple[str, ...],
        chosen: Patterns,
        before: "Plan | None" = None,
    ) -> None:
        self.model, self.group_of = (
            model,
            {id(p): group for group in groups for p in group["params"]},
        )
        found = Inspection(
            model, self.parameters(groups), chosen=chosen, matrices_alone="G" not in sides
        )
        self.entries: list[Covered] = found.entries
        self.left_out: list[Layer] = found.left_out
        self.names: dict[int, str] = {}
        # parameters that are DTensors, and how their rows are divided, by name
        self.sharded: dict[str, tuple[nn.Parameter, RowShards | None]] = {}
        self.attributes: list[tuple[str, nn.Module, str]] = []
        owners = owners_of(model)
        # the parameter of each place: FSDP2 replaces those of modules while they run
        self._places: dict[tuple[int, str], nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            owner = owners[id(parameter)][0]
            self._places.update(
                {(id(o.module), o.attribute): parameter for o in owners[id(parameter)]}
            )
            self.names[id(parameter)] = name
            self.attributes.append((name, owner.module, owner.attribute))
            if is_sharded(parameter):
                known = before.sharded.get(name) if before is not None else None
                same = known is not None and known[0] is parameter
                self.sharded[name] = (
                    known if same and known else (parameter, row_shards_of(parameter))
                )
        self._check_present(groups, before)
        self.first_shards = next(
            (shards for _, shards in self.sharded.values() if shards is not None), None
        )
        self.layers: dict[str, LayerCurvature] = {}
        for name, layer in found.layers.items():
            old = None if before is None else before.layers.get(name)
            made = LayerCurvature(name, layer.kind, layer.weight, layer.biases, layer.prefix, sides)
            self.layers[name] = old if old is not None and self._is_same(old, layer) else made
        self.hooks: list[ModuleHook] = hooks_of(found.layers, self.layers)
        self.shares_of: dict[int, list[Share]]  # by the id of the parameter
        self.bind(states)
        plain = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in found.matrices
        }
        # parameters that are matrices without factors, by id
        self.matrix_of: dict[int, PlainMatrix] = {
            id(p): found.matrices[name] for name, p in plain.items()
        }
        moving = {
            id(p) for p in self._places.values() if p.requires_grad and id(p) in self.group_of
        }
        weights = [share.is_weight for key in moving for share in self.shares_of.get(key, ())]
        # the number of matrices that are trained
        self.depth = sum(weights) + len(moving & self.matrix_of.keys())
        self.fingerprint: list[Any] = []  # of the optimizer when the plan was made

    @staticmethod
    def parameters(groups: Iterable[Group]) -> list[nn.Parameter]:
        """Return the parameters of all groups."""
        return [parameter for group in groups for parameter in group["params"]]

    def _is_same(self, old: LayerCurvature, new: Layer) -> bool:
        """Return whether a layer of the plan before is still this one."""
        # It must have the same weight, divided in the same way.
        view = old.weight_view
        return (
            (view.module, view.attribute, view.rows)
            == (new.weight.module, new.weight.attribute, new.weight.rows)
            and len(old.biases) == len(new.biases)
            and view.shards == self.shards_of(new.weight.parameter)
        )

    def bind(self, states: States) -> None:
        """Give every view of a layer its parameter, state, options and shards."""
        self.shares_of = {}
        self.program: Any = None  # what an update looks up for its steps until the next refresh
        for layer in self.layers.values():
            for view in (layer.weight_view, *layer.biases):
                parameter = self._places[id(view.module), view.attribute]
                group = self.group_of.get(id(parameter), {})
                view.bind(states.get(parameter), group, parameter, self.shards_of(parameter))
                self.shares_of.setdefault(id(parameter), []).append(
                    Share(layer, view, view is layer.weight_view)
                )
            layer.bind()
        for shares in self.shares_of.values():
            longest = max(len(share.view.outline()) for share in shares)
            for share in shares:
                share.view.longest = longest

    def _check_present(self, groups: list[Group], before: "Plan | None") -> None:
        """Raise an error if the groups hold nothing of the model, or weights were newly tied."""
        # Weights are newly tied if they were tied since the plan before.
        trained = self.parameters(groups)
        if trained and not any(id(p) in self.names for p in trained):
            if all(p.dim() == 1 for p in trained):
                raise RuntimeError(
                    "the optimizer's parameter groups have flat tensors in the place of the "
                    "model's parameters, as DeepSpeed's ZeRO and bf16 optimizers make them: the "
                    "matrices are needed, and such partitioned parameters cannot be used; use "
                    "FSDP2 (fully_shard, then the optimizer) or DistributedDataParallel in the "
                    "place of ZeRO"
                )
            raise RuntimeError(
                f"parameter {next(iter(self.names.values()))!r} is in none of the optimizer's "
                "parameter groups, and so are all others: they were replaced after the optimizer "
                "was made. Make it after that (after fully_shard, which replaces all parameters), "
                "or assign to parameter.data instead. DeepSpeed's bf16 and fp16 optimizers "
                "replace them too: use float32 with torch.autocast"
            )
        if before is None:
            return
        of_layers = {before.names[key] for key in before.shares_of}
        first: dict[int, str] = {}
        for name, module, attribute in before.attributes:
            now = module._parameters.get(attribute)
            other = name if now is None else first.setdefault(id(now), name)
            if other != name and not of_layers.isdisjoint((other, name)):
                raise RuntimeError(
                    f"{other!r} and {name!r} are one parameter: they were tied after the optimizer "
                    "was made, which takes them for the weights of two layers. Tie the weights "
                    "first, then make the optimizer"
                )

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model; of sharded parameters, the one for collectives."""
        for parameter, _ in self.sharded.values():
            return device_of_mesh(parameter)
        for layer in self.layers.values():
            return layer.weight.device
        return next(self.model.parameters()).device

    def name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the model."""
        return self.names.get(id(parameter), f"<parameter of shape {tuple(parameter.shape)}>")

    def shards_of(self, parameter: Tensor) -> RowShards | None:
        """Return how the rows of a parameter are divided."""
        return self.sharded.get(self.name(parameter), (parameter, None))[1]

    def shares(self, parameter: Tensor) -> list[Share]:
        """Return the shares of the layers that precondition a parameter."""
        return self.shares_of.get(id(parameter), [])


def free_rows(taken: Iterable[slice | None], length: int) -> list[slice]:
    """Return the rows of a parameter that belong to no layer.

    Such rows are, for example, those of a projection that the user has left out.
    """
    rows = sorted((0, length) if one is None else (one.start, one.stop) for one in taken)
    rows = [(start, stop) for start, stop in rows if start < stop]
    starts, stops = [0, *(stop for _, stop in rows)], [*(start for start, _ in rows), length]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
