"""Parameters as optimizers are given them, and their gradients."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

Group = dict[str, Any]
States = MutableMapping[Tensor, dict[str, Any]]  # an optimizer's state


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
