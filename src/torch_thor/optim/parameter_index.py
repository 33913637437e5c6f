"""An index of a model's parameters: the name, the group and the layers of each current parameter object.

Wrappers such as Accelerate put new parameter objects into modules and groups after the optimizer was created; their
names stay the same. So every step compares a fingerprint of them with that of the step before
(:func:`torch_thor.optim.step_inputs.fingerprint`), and updates the index if it differs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from torch_thor.capture.owners import owners_of
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.matrices import PlainMatrix
from torch_thor.curvature.parameter_view import ParameterView, State
from torch_thor.curvature.row_shards import RowShards
from torch_thor.distributed.sharded_parameters import is_sharded, row_shards_of
from torch_thor.optim.parameters import Group


@dataclass(frozen=True)
class Share:
    """The share of a layer in a parameter."""

    layer: LayerCurvature  # the layer
    view: ParameterView  # the parameter, or the rows of it that belong to the layer
    is_weight: bool  # whether the share is the layer's weight; otherwise it is a bias


def free_rows(taken: Iterable[slice | None], length: int) -> list[slice]:
    """Return the rows of a parameter that belong to no layer, such as a projection that the user has left out."""
    rows = sorted((0, length) if one is None else (one.start, one.stop) for one in taken)
    rows = [(start, stop) for start, stop in rows if start < stop]
    starts, stops = [0, *(stop for _, stop in rows)], [*(start for start, _ in rows), length]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


class ParameterIndex:
    """The names, groups and layers of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self.shares_of: dict[int, list[Share]] = {}  # the shares of layers in a parameter, by its id
        self.matrix_of: dict[int, PlainMatrix] = {}  # the matrices of a parameter without factors, by its id
        # parameters whose rows are divided among processes, and how, by name
        self.sharded: dict[str, tuple[nn.Parameter, RowShards | None]] = {}
        self.first_shards: RowShards | None = None  # how the rows of one of them are divided; None if there is none
        self.depth = 0  # the number of matrices that are trained: weights of layers, and plain matrices
        self.read_modules(model)

    def read_modules(self, model: nn.Module) -> None:
        """Look up the names of the parameters and the modules that own them."""
        owners = owners_of(model)
        self._owners = {name: owners[id(parameter)][0] for name, parameter in model.named_parameters()}
        self.owner_ids = frozenset(id(owner.module) for owner in self._owners.values())
        self.attributes = [(name, owner.attribute, owner.module) for name, owner in self._owners.items()]
        self.computed: list[str] = []  # the names of modules that compute a parameter since: pruned or parametrised
        self.tied: list[tuple[str, str]] = []  # pairs of names that belong to one parameter since
        self.divided_since = False  # whether a parameter is divided among processes that was whole
        self._whole = {name for name, parameter in model.named_parameters() if not is_sharded(parameter)}
        self._groups: dict[int, Group] = {}
        self._shares: dict[str, list[Share]] = {}
        self._matrices: dict[str, PlainMatrix] = {}

    def set_layers(self, layers: Mapping[str, LayerCurvature], matrices: Mapping[str, PlainMatrix]) -> None:
        """Set the layers that are preconditioned."""
        # by identity, because a layer may use another name of a shared parameter than named_parameters()
        names = {id(module._parameters[attribute]): name for name, attribute, module in self.attributes}
        self._shares, self._matrices = {}, dict(matrices)
        for layer in layers.values():
            for view in (layer.weight_view, *layer.biases):
                name = names[id(view.parameter)]
                self._shares.setdefault(name, []).append(Share(layer, view, view is layer.weight_view))
        for shares in self._shares.values():
            longest = max(share.view.longest for share in shares)
            for share in shares:
                share.view.longest = longest

    def update(self, groups: list[Group], states: Mapping[Tensor, State]) -> None:
        """Look up the current parameter objects, and bind the views of the layers to their state and options."""
        self._names, self.shares_of, self.matrix_of = {}, {}, {}
        self.computed, self.tied = [], []
        self.depth = 0
        self._groups = {id(p): group for group in groups for p in group["params"]}
        for name, attribute, module in self.attributes:
            parameter = module._parameters.get(attribute)
            if parameter is None:
                self.computed.append(name.rpartition(".")[0])
                continue
            parameter, shards = self._with_shards(name, parameter)
            other = self._names.get(id(parameter))
            if other is not None and (name in self._shares or other in self._shares):
                self.tied.append((other, name))
            self._names[id(parameter)] = name
            if name in self._matrices:
                self.matrix_of[id(parameter)] = self._matrices[name]
            if name in self._shares:
                self.shares_of[id(parameter)] = self._shares[name]
            if parameter.requires_grad and id(parameter) in self._groups:
                weights = sum(share.is_weight for share in self._shares.get(name, ()))
                self.depth += weights or name in self._matrices
            for share in self._shares.get(name, ()):
                share.view.bind(states.get(parameter), self._groups.get(id(parameter), {}), parameter, shards)

    def divided(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters whose rows are divided among processes."""
        return [(name, parameter) for name, (parameter, shards) in self.sharded.items() if shards is not None]

    def shards_of(self, parameter: Tensor) -> RowShards | None:
        """Return how the rows of a parameter are divided."""
        return self.sharded.get(self.name(parameter), (parameter, None))[1] if self.sharded else None

    def _with_shards(self, name: str, present: nn.Parameter) -> tuple[nn.Parameter, RowShards | None]:
        """Return the parameter that is trained, and how its rows are divided; None if they are not."""
        found = self.sharded.get(name)
        if is_sharded(present):
            self.divided_since |= name in self._whole and id(present) in self._groups
            if found is None or found[0] is not present:
                found = self.sharded[name] = present, row_shards_of(present)
                self.first_shards = next((shards for _, shards in self.sharded.values() if shards is not None), None)
            return found
        return (present, None) if found is None or id(found[0]) not in self._groups else found

    def removed_modules(self, model: nn.Module) -> list[str]:
        """Return the modules that were replaced or removed since :meth:`read_modules`."""
        present = {id(module) for module in model.modules()}
        names = (owner.module_name for owner in self._owners.values() if id(owner.module) not in present)
        return list(dict.fromkeys(names))

    def name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the model."""
        return self._names.get(id(parameter), f"<parameter of shape {tuple(parameter.shape)}>")

    def group(self, parameter: Tensor) -> Group:
        """Return a parameter's group."""
        if id(parameter) not in self._groups:
            trained = [p for group in {id(g): g for g in self._groups.values()}.values() for p in group["params"]]
            if all(p.dim() == 1 and id(p) not in self._names for p in trained):
                raise RuntimeError(
                    f"parameter {self.name(parameter)!r} is in none of the optimizer's parameter groups: they have "
                    f"flat tensors in the place of the model's parameters, as DeepSpeed's ZeRO and bf16 optimizers "
                    f"make them. THOR needs the matrices, and cannot work with such partitioned parameters; use FSDP2 "
                    f"(fully_shard, then THOR) or DistributedDataParallel in the place of ZeRO"
                )
            raise RuntimeError(
                f"parameter {self.name(parameter)!r} is in none of the optimizer's parameter groups: it was replaced "
                f"after THOR was made. Make THOR after that (after fully_shard, which replaces all parameters), or "
                f"assign to parameter.data instead"
            )
        return self._groups[id(parameter)]

    def shares(self, parameter: Tensor) -> list[Share]:
        """Return the shares of the layers that precondition a parameter."""
        return self.shares_of.get(id(parameter), [])
