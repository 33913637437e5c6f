"""The arguments ``params`` and ``model`` of the optimizers, and the gradients of a step."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from torch_thor.capture.patterns import some
from torch_thor.curvature.factor import local

Group = dict[str, Any]
States = MutableMapping[Tensor, dict[str, Any]]  # the state of an optimizer: entries by parameter


def parameters_of(
    params: nn.Module | Iterable[Any], model: nn.Module | None, optimizer: str
) -> tuple[Iterable[Any], nn.Module | None]:
    """Return the parameters and the model that an optimizer was given."""
    if isinstance(params, nn.Module):
        if model is not None and model is not params:
            raise ValueError(
                f"two models were given; pass {optimizer}(model, ...) or {optimizer}(parameters, model=model, ...)"
            )
        return params.parameters(), params
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: must be the nn.Module whose parameters are trained")
    return params, model


def parameters_of_model(
    params: nn.Module | Iterable[Any], model: nn.Module | None, optimizer: str
) -> tuple[Iterable[Any], nn.Module]:
    """Do the same for an optimizer that must know the model."""
    params, model = parameters_of(params, model, optimizer)
    if model is None:
        raise TypeError(
            f"model=None: {optimizer} reads the inputs of layers, so it must know the model; pass {optimizer}(model, "
            f"...), {optimizer}(parameters, model=model, ...) or, to a factory, functools.partial({optimizer}, "
            f"model=model)"
        )
    return params, model


def check_known(parameters: Iterable[Tensor], model: nn.Module) -> None:
    """Raise an error for parameters that are not in the model."""
    known = {id(p) for p in model.parameters()}
    unknown = [str(tuple(p.shape)) for p in parameters if id(p) not in known]
    if unknown:
        raise ValueError(
            f"parameters of shape {some(unknown)} are not in the model, so their layers cannot be seen; pass the model "
            f"that holds them, or give them an optimizer of their own"
        )


def parameters_with_gradient(groups: list[Group]) -> Iterator[tuple[Group, nn.Parameter, Tensor]]:
    """Iterate over the parameters that have a gradient."""
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, local(parameter.grad)
