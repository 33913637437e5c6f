"""The arguments ``params`` and ``model`` of the optimizers, and the gradients of a step."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from torch_thor.capture.patterns import some

Closure = Callable[[], float]  # evaluates the model again, and returns the loss
Group = dict[str, Any]
States = MutableMapping[Tensor, dict[str, Any]]  # the state of an optimizer: entries by parameter

_MODEL: ContextVar[nn.Module | None] = ContextVar("model", default=None)


@contextmanager
def model_is(model: nn.Module) -> Iterator[None]:
    """Name the model of optimizers made inside, for code that passes them only parameters.

    Trainers make optimizers from a class and a model's parameters, in groups of their own. THOR and
    ThorMuon read the inputs of layers, so they must know the model too, and LAMB and AGCSGD look up
    names and layers in it:

    >>> with model_is(model):  # doctest: +SKIP
    ...     trainer.train()

    A model that an optimizer is given itself, first or as ``model=``, counts more.

    Args:
        model: the model whose parameters the optimizers are given; not wrapped by DDP or
            torch.compile.
    """
    token = _MODEL.set(model)
    try:
        yield
    finally:
        _MODEL.reset(token)


def parameters_of(
    params: nn.Module | Iterable[Any], model: nn.Module | None, optimizer: str
) -> tuple[Iterable[Any], nn.Module | None]:
    """Return the parameters and the model that an optimizer was given."""
    if isinstance(params, nn.Module):
        if model is not None and model is not params:
            raise ValueError(
                f"two models were given; pass {optimizer}(model, ...) or {optimizer}(parameters, "
                "model=model, ...)"
            )
        return params.parameters(), params
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: must be the nn.Module whose parameters are trained")
    return params, _MODEL.get() if model is None else model


def parameters_of_model(
    params: nn.Module | Iterable[Any], model: nn.Module | None, optimizer: str
) -> tuple[Iterable[Any], nn.Module]:
    """Do the same for an optimizer that must know the model."""
    params, model = parameters_of(params, model, optimizer)
    if model is None:
        raise TypeError(
            f"model=None: {optimizer} reads the inputs of layers, so it must know the model; pass "
            f"{optimizer}(model, ...) or {optimizer}(parameters, model=model, ...); where a "
            f"trainer makes the optimizer, give it functools.partial({optimizer}, model=model), "
            "or let it run inside `with torch_thor.model_is(model):`"
        )
    return params, model


def check_known(parameters: Iterable[Tensor], model: nn.Module) -> None:
    """Raise an error for parameters that are trained and not in the model."""
    # a module may make its frozen parameters anew whenever they are read, as adapters of peft do
    known = {id(p) for p in model.parameters()}
    unknown = [str(tuple(p.shape)) for p in parameters if p.requires_grad and id(p) not in known]
    if unknown:
        raise ValueError(
            f"parameters of shape {some(unknown)} are not in the model, so their layers cannot be "
            f"seen; pass the model that holds them, or give them an optimizer of their own"
        )
