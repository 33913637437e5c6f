"""The coverage of a model as it is now: the entries of its inspection, updated for frozen and for uncalled layers."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from torch_thor.capture.coverage import LEFT_OUT, Covered
from torch_thor.capture.patterns import some
from torch_thor.optim.plan import Plan

_UNCALLED = "the weight is used without calling the module, so no statistics come"


def current(entries: Iterable[Covered], plan: Plan) -> list[Covered]:
    """Return the entries of an inspection as they are now."""
    parameters = dict(plan.model.named_parameters())
    return [_now(entry, parameters[entry.name], plan) for entry in entries if entry.name in parameters]


def _now(entry: Covered, parameter: Tensor, plan: Plan) -> Covered:
    if not parameter.requires_grad:
        can_be_trained = parameter.is_floating_point() or parameter.is_complex()
        return replace(entry, reason="frozen (requires_grad=False)" if can_be_trained else entry.reason, trained=False)
    shares = plan.shares(parameter) if isinstance(parameter, nn.Parameter) else []
    if not entry.preconditioned or not shares:
        return entry
    if not any(share.layer.weight.requires_grad for share in shares):
        return replace(entry, reason="the weight of its layer is frozen")
    if all(share.layer.uncalled and not share.layer.refreshes for share in shares):
        return replace(entry, reason=_UNCALLED if shares[0].is_weight else f"like its layer: {_UNCALLED}")
    return entry


def sizes(entries: Iterable[Covered]) -> tuple[int, int]:
    """Count the elements of the trained parameters: those that are preconditioned, and all."""
    trained = [entry for entry in entries if entry.trained]
    return sum(_size(entry) for entry in trained if entry.preconditioned), sum(_size(entry) for entry in trained)


def _size(entry: Covered) -> int:
    return math.prod(entry.shape)


def warn_of_little(entries: Iterable[Covered], optimizer: str, stacklevel: int) -> None:
    """Warn if less than half of the trained parameters is preconditioned, apart from what ``layers=`` leaves out."""
    entries = [entry for entry in entries if entry.reason != LEFT_OUT]
    covered, total = sizes(entries)
    if 2 * covered >= total:
        return
    plain = sorted((e for e in entries if e.trained and not e.preconditioned), key=_size, reverse=True)
    largest = "; ".join(f"{e.name} {e.shape} ({e.rest}): {e.reason}" for e in plain[:3])
    more = f"; and {len(plain) - 3} more" if len(plain) > 3 else ""
    warnings.warn(
        f"{optimizer} preconditions {covered:,} of {total:,} trained parameters ({covered / total:.0%}). The largest "
        f"of the others: {largest}{more}. print(optimizer) lists all",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def untrained_message(names: Sequence[str]) -> str:
    """Return a sentence about parameters that are not trained."""
    return (
        f"In no parameter group, and so not trained, are {some(names)}: give them to "
        f"optimizer.add_param_group({{'params': [...]}}), or make the optimizer again."
    )
