"""Which parameter is which: names, groups, state and layers, looked up by today's parameter objects.

Wrappers such as FSDP2 and Accelerate put new parameter objects into modules and groups after the optimizer was made,
so nothing here outlives a step: names hold, identities do not.

Layers look here for their state and split dimension, not at the optimizer: with no way back to it, one that is dropped
is gone at once, and its hooks with it, while whoever holds a layer's curvature can still read it.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_thor.curvature.layer import LayerCurvature, Piece
from torch_thor.curvature.matrices import PlainMatrix

Group = dict[str, Any]


def parameters_of(
    params: nn.Module | Iterable[Any], model: nn.Module | None, optimizer: str
) -> tuple[Iterable[Any], nn.Module | None]:
    """Tell the model from the parameters that an optimizer is given.

    Args:
        params: the model; or parameters, named parameters or parameter groups.
        model: the model, where ``params`` are parameters; None where it is not given.
        optimizer: what messages call it.

    Returns:
        The parameters, and the model.

    Raises:
        ValueError: two models were given.
        TypeError: ``model`` is none.
    """
    if isinstance(params, nn.Module):
        if model is not None and model is not params:
            raise ValueError(
                f"two models were given; pass {optimizer}(model, ...) or {optimizer}(parameters, model=model, ...)"
            )
        return params.parameters(), params
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: must be the nn.Module whose parameters are trained")
    return params, model


@dataclass(frozen=True)
class Share:
    """What a layer has of a parameter.

    Args:
        layer: the layer.
        piece: the parameter, or rows of it.
        is_weight: whether it is the layer's weight, else a bias.
    """

    layer: LayerCurvature
    piece: Piece
    is_weight: bool


class ParameterIndex:
    """Names and roles of a model's parameters.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.states: MutableMapping[Tensor, Any] = {}
        self._given: list[Group] = []
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
            for piece in (layer.weight_piece, *layer.biases):
                name = names[id(piece.parameter)]
                self._shares.setdefault(name, []).append(Share(layer, piece, piece is layer.weight_piece))

    def update(self, groups: list[Group], states: MutableMapping[Tensor, Any]) -> None:
        """Look up today's parameter objects.

        Args:
            groups: the optimizer's parameter groups.
            states: its state.
        """
        self._given, self.states = groups, states
        self._names = {}
        self.computed = []
        for name, attribute, module in self._attributes:
            parameter = module._parameters.get(attribute)
            if parameter is not None:
                self._names[id(parameter)] = name
            else:
                self.computed.append(name.rpartition(".")[0])
        self._groups = {id(p): group for group in groups for p in group["params"]}

    def identities(self) -> list[int]:
        """Return which parameter objects the model has today.

        Returns:
            Their ``id``.
        """
        return list(self._names)

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
        if id(parameter) not in self._groups:  # asked in a forward pass, after a wrapper replaced the parameters?
            self.update(self._given, self.states)
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


def with_gradient(groups: list[Group]) -> Iterator[tuple[Group, nn.Parameter, Tensor]]:
    """Iterate over the parameters that got a gradient this step.

    Args:
        groups: the optimizer's parameter groups.

    Yields:
        Group, parameter, gradient.
    """
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad


def dense_gradients(parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one, as tensors to add to their state.

    Args:
        parameters: the parameters.
        buffers: a tensor of the state of each.

    Returns:
        Dense tensors of the buffers' dtypes; the gradients themselves where they are that already.
    """
    gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    return [g.to(buffer.dtype) for g, buffer in zip(gradients, buffers, strict=True)]
