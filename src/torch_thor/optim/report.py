"""What an optimizer reports: its model's coverage now, its description, and step warnings."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_thor.capture.coverage import Covered, table
from torch_thor.capture.patterns import some
from torch_thor.capture.reasons import LEFT_OUT
from torch_thor.curvature.view import local
from torch_thor.optim.batches import Binding
from torch_thor.optim.options import COUNTERS

# entries of a parameter group that nobody has given
NO_OPTIONS = {
    "params", "param_names", "auto_lr", "trained", "lr_squares", "shows_average", *COUNTERS,
}  # fmt: skip
_UNCALLED = "the weight of its layer is used without calling the module"


def current(binding: Binding) -> list[Covered]:
    """Return the entries of an inspection as they are now."""
    named, entries = dict(binding.plan.model.named_parameters()), []
    for entry in binding.plan.entries:
        parameter = named.get(entry.name)
        if parameter is None:
            continue
        layers = binding.layers_of(parameter) if entry.preconditioned else []
        if not parameter.requires_grad:
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            reason = "frozen (requires_grad=False)" if can_be_trained else entry.reason
            entry = replace(entry, reason=reason, trained=False)
        elif layers and not any(layer.weight.requires_grad for layer in layers):
            entry = replace(entry, reason="the weight of its layer is frozen")
        elif layers and all(layer.uncalled and not layer.refreshes for layer in layers):
            entry = replace(entry, reason=_UNCALLED)
        entries.append(entry)
    return entries


def sizes(entries: Iterable[Covered]) -> tuple[int, int]:
    """Count the elements of the trained parameters: those that are preconditioned, and all."""
    trained = [(math.prod(entry.shape), entry.preconditioned) for entry in entries if entry.trained]
    return sum(size for size, covered in trained if covered), sum(size for size, _ in trained)


def warn_of_little(entries: Iterable[Covered], optimizer: str) -> None:
    """Warn if less than half of the trained parameters is preconditioned.

    Parameters that ``layers=`` leaves out are not counted.
    """
    entries = [entry for entry in entries if entry.reason != LEFT_OUT]
    covered, total = sizes(entries)
    if 2 * covered >= total:
        return
    plain = [entry for entry in entries if entry.trained and not entry.preconditioned]
    plain.sort(key=lambda entry: math.prod(entry.shape), reverse=True)
    largest = "; ".join(f"{e.name} {e.shape} ({e.rest}): {e.reason}" for e in plain[:3])
    more = f"; and {len(plain) - 3} more" if len(plain) > 3 else ""
    warnings.warn(
        f"{optimizer} preconditions {covered:,} of {total:,} trained parameters "
        f"({covered / total:.0%}). The largest of the others: {largest}{more}. print(optimizer) "
        "lists all",
        UserWarning,
        stacklevel=4,
    )


def _bytes_of_state(optimizer: Any, trained: int) -> str:
    """Return how much memory the state takes on this process, which the first step makes."""
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    size = sum(local(entry).nbytes for entry in entries if isinstance(entry, Tensor))
    if not size:
        return "State: none before the first step"
    each = f", {size / trained:.1f} for each trained parameter" if trained else ""
    return f"State: {size:,} bytes{each}"


def described(optimizer: Any) -> str:
    """Return the options of each group, the size of the state, and what each parameter gets."""
    lines = [f"{type(optimizer).__name__} ("]
    for number, group in enumerate(optimizer.param_groups):
        keys = [
            key
            for key in dict.fromkeys((*optimizer.defaults, *group))
            if key in group and key not in NO_OPTIONS
        ]
        lines += [f"Parameter Group {number}", *(f"    {key}: {group[key]}" for key in keys)]
    entries = optimizer.coverage()
    part, total = sizes(entries)
    split = ", ".join(
        dict.fromkeys(str(group.get("split_dim")) for group in optimizer.param_groups)
    )
    count = sum(layer.weight.requires_grad for layer in optimizer.curvature.values())
    lines += [
        _bytes_of_state(optimizer, total),
        ")",
        f"{part:,} of {total:,} trained parameters, in {count} layers, are preconditioned:",
    ]
    return "\n".join((*lines, table(entries, f"factors (split {split})")))


def nothing_found(optimizer: type, binding: Binding) -> str:
    """Return the text of the error for a model without a layer to precondition."""
    label = optimizer.__name__
    return (
        f"{label} found no layer to precondition among what is trained in "
        f"{type(binding.plan.model).__name__}; use torch.optim.SGD, or give {label} the weights of "
        f"its layers. What it found:\n{table(current(binding))}"
    )


# ---- warnings of a step --------------------------------------------------------------------------


class StepWarnings:
    """Warnings that are issued when the step is complete, each once.

    They wait until then because a program may turn warnings into errors.
    """

    def __init__(self, optimizer: type) -> None:
        self.label = optimizer.__name__
        self._known: set[tuple[str, str]] = set()
        self.pending: dict[str, list[str]] = {}  # the names of the layers that each is about

    def note(self, text: str, layer: str = "") -> None:
        """Add a warning, as a rule about a layer, unless it has been added before."""
        if (text, layer) not in self._known:
            self._known.add((text, layer))
            self.pending.setdefault(text, []).append(repr(layer))

    def issue(self) -> None:
        """Issue the warnings that have been added."""
        pending, self.pending = self.pending, {}
        for text, layers in pending.items():
            about = "" if layers == ["''"] else f", {'layers' if layers[1:] else 'layer'} "
            names = some(layers) if about else ""
            message = f"{self.label}{about}{names}: {text}"
            warnings.warn(message, RuntimeWarning, stacklevel=8)
