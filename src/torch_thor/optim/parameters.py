"""The arguments ``params`` and ``model`` of the optimizers, and the gradients of a step."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from torch_thor.curvature.shards import local

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


def parameters_with_gradient(groups: list[Group]) -> Iterator[tuple[Group, nn.Parameter, Tensor]]:
    """Iterate over the parameters that have a gradient."""
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, local(parameter.grad)
