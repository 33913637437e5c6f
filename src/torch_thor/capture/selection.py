"""The arguments ``skip`` and ``only``, with which the user chooses the layers to precondition."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

SKIPPED = "left out by skip="
NOT_KEPT = "not among only="

# Names, patterns, or a callable (name, module) -> bool; None for no choice.
Selection = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


def left_out(candidates: Mapping[str, nn.Module], skip: Selection, only: Selection) -> dict[str, str]:
    """Return the layers that are not to be preconditioned."""
    reasons = {}
    if only is not None:
        kept = _matching("only", only, candidates)
        reasons = {name: NOT_KEPT for name in candidates if name not in kept}
    if skip is not None:
        reasons.update({name: SKIPPED for name in _matching("skip", skip, candidates)})
    return reasons


def _matching(argument: str, selection: Selection, candidates: Mapping[str, nn.Module]) -> set[str]:
    if callable(selection):
        return {name for name, module in candidates.items() if selection(name, module)}
    patterns = [selection] if isinstance(selection, str) else selection
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"{argument}={selection!r}: must be a name, a pattern, a list of them, or a callable (name, module) -> bool"
        )
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in candidates if any(fnmatchcase(part, pattern) for part in self_and_parents(name))}
        if not matched:
            names = list(candidates)
            raise ValueError(
                f"{argument}: {pattern!r} matches no layer that THOR preconditions; the layers are "
                f"{', '.join(names[:20])}{f' and {len(names) - 20} more' if len(names) > 20 else ''}"
            )
        found |= matched
    return found


def self_and_parents(name: str) -> list[str]:
    """Return a dotted name and the names of all modules around it."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
