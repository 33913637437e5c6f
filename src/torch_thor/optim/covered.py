"""The coverage of a model as it is now: the result of its inspection, updated for frozen and for uncalled layers."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from torch_thor.capture.coverage import NOT_TRAINED, Covered
from torch_thor.capture.selection import SKIPPED
from torch_thor.optim.gradient_checks import some
from torch_thor.optim.parameter_index import ParameterIndex

_UNCALLED = "the weight is used without calling the module, so no statistics come"


def current_coverage(
    entries: Iterable[Covered], parameters: Mapping[str, Tensor], index: ParameterIndex
) -> list[Covered]:
    """Return the entries of an inspection as they are now."""
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
    """Count the elements of the trained parameters."""
    trained = [entry for entry in entries if entry.trained]
    return sum(_size(entry) for entry in trained if entry.preconditioned), sum(_size(entry) for entry in trained)


def warn_of_little(entries: Iterable[Covered], stacklevel: int) -> None:
    """Warn if less than half of the trained parameters is preconditioned, apart from what ``skip=`` leaves out."""
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


def new_parameters(before: Iterable[Covered], now: Iterable[Covered]) -> list[str]:
    """Return the parameters that the model has got since, and that are in no parameter group."""
    known = {entry.name for entry in before if entry.reason == NOT_TRAINED}
    return [entry.name for entry in now if entry.reason == NOT_TRAINED and entry.name not in known]


def removed_message(new: Sequence[str]) -> str:
    """Return the end of the warning for a module that was removed from the model, after its name."""
    change = " is no longer in the model: it was replaced or removed after THOR was made"
    return change + (f". {_untrained(new)}" if new else ", and its parameters are not trained any more")


def computed_message(new: Sequence[str]) -> str:
    """Return the end of the warning for a layer whose weight is computed from other parameters now, after its name."""
    change = " is no parameter any more: it was pruned or parametrised after THOR was made"
    if new:
        return f"{change}. {_untrained(new)}"
    return (
        f"{change}, and the parameters that it is computed from are trained plainly; THOR preconditions it again when "
        f"it is a parameter again"
    )


def nothing_trained_message(step: int, new: Sequence[str]) -> str:
    """Return the text of the warning for a step in which no parameter of the groups has a gradient."""
    return (
        f"THOR, step {step}: no parameter in its groups has a gradient, so nothing is trained. {_untrained(new)}. "
        f"Where an adapter was added (LoRA), make it first: peft.get_peft_model(model, ...), then THOR(model)"
    )


def _untrained(new: Sequence[str]) -> str:
    return (
        f"In no parameter group, and so not trained, are {some(new)}: give them to "
        f"optimizer.add_param_group({{'params': [...]}}), or make THOR again"
    )
