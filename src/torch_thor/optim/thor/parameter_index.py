"""Which parameter is which: names, groups and layers, looked up by today's parameter objects.

Wrappers such as FSDP2 and Accelerate put new parameter objects into modules and groups after the optimizer was made:
names stay, identities do not. So every step compares what it finds with what it found before
(:meth:`ParameterIndex.look`), and looks everything up again where that differs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.matrices import PlainMatrix
from torch_thor.curvature.parameter_view import ParameterView, State
from torch_thor.optim.parameters import Group
from torch_thor.split.observe import LARGEST


def block_size(group: Group) -> int | None:
    """Return the block size to cut a group's factors with at this time.

    Args:
        group: a parameter group.

    Returns:
        The group's number, None for unsplit; while "auto" is undecided, 8192: the choice needs factors uncut.
    """
    split_dim: int | str | None = group["split_dim"]
    return split_dim if split_dim is None or isinstance(split_dim, int) else LARGEST


@dataclass(frozen=True)
class Share:
    """What a layer has of a parameter.

    Args:
        layer: the layer.
        view: the parameter, or rows of it.
        is_weight: whether it is the layer's weight, else a bias.
    """

    layer: LayerCurvature
    view: ParameterView
    is_weight: bool


class ParameterIndex:
    """Names and roles of a model's parameters.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self.survey(model)

    def survey(self, model: nn.Module) -> None:
        """Look up the names of the parameters, and which modules own them.

        Args:
            model: the model; it may have new layers.
        """
        self._owners = {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_parameters()}
        self._attributes = [(name, name.rpartition(".")[2], module) for name, module in self._owners.items()]
        self.computed: list[str] = []  # modules that have lost a parameter: pruned or parametrised since
        self._groups: dict[int, Group] = {}
        self._shares: dict[str, list[Share]] = {}
        self._matrices: dict[str, PlainMatrix] = {}

    def set_layers(self, layers: Mapping[str, LayerCurvature], matrices: Mapping[str, PlainMatrix]) -> None:
        """Say which layers are preconditioned.

        Args:
            layers: by name.
            matrices: what is a matrix and has no factors, by the parameter's name.
        """
        # by identity: a layer may be known by another of a shared parameter's names than the model's first
        names = {id(module._parameters[name.rpartition(".")[2]]): name for name, module in self._owners.items()}
        self._shares, self._matrices = {}, dict(matrices)
        for layer in layers.values():
            for view in (layer.weight_piece, *layer.biases):
                name = names[id(view.parameter)]
                self._shares.setdefault(name, []).append(Share(layer, view, view is layer.weight_piece))

    def look(self, groups: Iterable[Group], states: Mapping[Tensor, State]) -> list[Any]:
        """Return all that the layers' views and the optimizer's state depend on, cheap enough for every step.

        Args:
            groups: the optimizer's parameter groups.
            states: its state.

        Returns:
            Identities, shapes, precisions, devices and block sizes; two equal results mean that nothing has changed.
        """
        found: list[Any] = [len(states)]
        for _, attribute, module in self._attributes:
            found.append(id(module._parameters.get(attribute)))
        for group in groups:
            found.append((id(group), group["split_dim"], len(group["params"])))
            for p in group["params"]:
                state = states.get(p)
                buffer = None if state is None else state.get("momentum_buffer")
                shape = None if buffer is None else buffer.shape
                found.append((id(p), p.requires_grad, p.shape, p.dtype, p.device, id(state), shape))
        return found

    def update(self, groups: list[Group], states: Mapping[Tensor, State]) -> None:
        """Look up today's parameter objects, and hand their state and block size to the layers' views.

        Args:
            groups: the optimizer's parameter groups.
            states: its state.
        """
        self._names = {}
        self.computed = []
        self._groups = {id(p): group for group in groups for p in group["params"]}
        for name, attribute, module in self._attributes:
            parameter = module._parameters.get(attribute)
            if parameter is None:
                self.computed.append(name.rpartition(".")[0])
                continue
            self._names[id(parameter)] = name
            for share in self._shares.get(name, ()):
                group = self._groups.get(id(parameter))
                share.view.bind(states.get(parameter), None if group is None else block_size(group))

    def gone(self, model: nn.Module) -> list[str]:
        """Return what is no longer in the model: modules that were replaced or deleted after they were surveyed.

        Args:
            model: the model.

        Returns:
            Names of modules that have parameters of their own.
        """
        present = {id(module) for module in model.modules()}
        names = (name.rpartition(".")[0] for name, module in self._owners.items() if id(module) not in present)
        return list(dict.fromkeys(names))

    def name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the model.

        Args:
            parameter: one of today's parameters.

        Returns:
            The name; a description where the model has replaced the parameter by another.
        """
        return self._names.get(id(parameter), f"<parameter of shape {tuple(parameter.shape)}>")

    def group(self, parameter: Tensor) -> Group:
        """Return a parameter's group.

        Args:
            parameter: one of today's parameters.

        Returns:
            The group.

        Raises:
            RuntimeError: it stands in none: a module's parameter was replaced behind the optimizer's back.
        """
        if id(parameter) not in self._groups:
            raise RuntimeError(
                f"parameter {self.name(parameter)!r} is in none of the optimizer's parameter groups: it was replaced "
                f"after THOR was made; make THOR after that, or assign to parameter.data instead. (FSDP replaces "
                f"parameters in every forward pass, and THOR does not train under it yet: use DistributedDataParallel)"
            )
        return self._groups[id(parameter)]

    def plain_matrix(self, parameter: Tensor) -> PlainMatrix | None:
        """Return how a parameter without factors is a matrix.

        Args:
            parameter: one of today's parameters.

        Returns:
            The matrices; None where it has factors, or is no matrix.
        """
        return self._matrices.get(self.name(parameter))

    def shares(self, parameter: Tensor) -> list[Share]:
        """Return what precondition a parameter, layer by layer.

        Args:
            parameter: one of today's parameters.

        Returns:
            The layers' shares of it; none for one without.
        """
        return self._shares.get(self.name(parameter), [])
