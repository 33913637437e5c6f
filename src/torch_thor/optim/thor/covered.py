"""What is preconditioned today: the inspection of the model, seen with what was frozen and what was never called."""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from torch_thor.capture.coverage import NOT_TRAINED, Covered
from torch_thor.capture.selection import SKIPPED
from torch_thor.optim.thor.gradient_checks import some
from torch_thor.optim.thor.parameter_index import ParameterIndex

_UNCALLED = "the weight is used without calling the module, so no statistics come"


def covered_now(entries: Iterable[Covered], parameters: Mapping[str, Tensor], index: ParameterIndex) -> list[Covered]:
    """Return the inspection's entries as they hold now.

    Args:
        entries: what the inspection found.
        parameters: the model's parameters, by name.
        index: knows the layers of each.

    Returns:
        One entry per parameter, in the model's order.
    """
    return [_now(entry, parameters[entry.name], index) for entry in entries if entry.name in parameters]


def _now(entry: Covered, parameter: Tensor, index: ParameterIndex) -> Covered:
    if not parameter.requires_grad:
        can_be_trained = parameter.is_floating_point() or parameter.is_complex()
        return replace(entry, reason="frozen (requires_grad=False)" if can_be_trained else entry.reason, trained=False)
    shares = index.shares(parameter) if isinstance(parameter, nn.Parameter) else []
    if not entry.preconditioned or not shares:
        return entry
    if not any(share.layer.weight.requires_grad for share in shares):
        return replace(entry, reason="the weight of its layer is frozen")
    if all(share.layer.uncalled and not share.layer.refreshes for share in shares):
        return replace(entry, reason=_UNCALLED if shares[0].is_weight else f"like its layer: {_UNCALLED}")
    return entry


def sizes(entries: Iterable[Covered]) -> tuple[int, int]:
    """Count what is trained.

    Args:
        entries: what each parameter gets.

    Returns:
        How many numbers are preconditioned, and how many are trained at all.
    """
    trained = [entry for entry in entries if entry.trained]
    return sum(_size(entry) for entry in trained if entry.preconditioned), sum(_size(entry) for entry in trained)


def warn_of_little(entries: Iterable[Covered], stacklevel: int) -> None:
    """Say so, where less than half of what is trained is preconditioned, and the user has not chosen so by ``skip=``.

    Args:
        entries: what each parameter gets.
        stacklevel: as for :func:`warnings.warn`.
    """
    entries = [entry for entry in entries if entry.reason != SKIPPED]
    covered, total = sizes(entries)
    if 2 * covered >= total:
        return
    plain = sorted((e for e in entries if e.trained and not e.preconditioned), key=_size, reverse=True)
    largest = "; ".join(f"{e.name} {e.shape} ({e.rest}): {e.reason}" for e in plain[:3])
    more = f"; and {len(plain) - 3} more" if len(plain) > 3 else ""
    warnings.warn(
        f"THOR preconditions {covered:,} of {total:,} trained parameters ({covered / total:.0%}). The largest of the "
        f"others: {largest}{more}. print(optimizer) lists all",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def _size(entry: Covered) -> int:
    return math.prod(entry.shape)


def gone_message(name: str, before: Iterable[Covered], now: Iterable[Covered], *, computed: bool = False) -> str:
    """Return the text of the warning for a module that is no longer in the model, or has lost a parameter.

    Args:
        name: the module.
        before: what every parameter got while it was there.
        now: what every parameter gets.
        computed: whether the module is there, and computes what was its weight.

    Returns:
        The message.
    """
    known = {entry.name for entry in before if entry.reason == NOT_TRAINED}
    new = [entry.name for entry in now if entry.reason == NOT_TRAINED and entry.name not in known]
    told = f"THOR: module {name!r} is no longer in the model: it was replaced or removed after THOR was made"
    then = ", and what it had is not trained any more"
    if computed:
        told = (
            f"THOR: the weight of {name!r} is no parameter any more: it was pruned or parametrised after THOR was made"
        )
        then = ", and what it is computed from is trained plainly; THOR takes it up again when it is a parameter again"
    if not new:
        return told + then
    return (
        f"{told}. In no parameter group, and so not trained, are {some(new)}: give them to "
        f"optimizer.add_param_group({{'params': [...]}}), or make THOR anew"
    )
