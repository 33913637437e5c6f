"""The one language in which users select layers and parameters: patterns of names.

A pattern of :mod:`fnmatch` (``*``, ``?``, ``[...]``, case-sensitive) that matches the name of a
module selects everything inside the module: ``"encoder"``, ``"*.attn"``. A leading minus excludes:
``["encoder", "-encoder.0"]``. If every pattern excludes, all other names are selected. What
wrappers add to names, ``module.`` of DDP and ``_orig_mod.`` of torch.compile, may be there or not,
in patterns and in names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

# One or more patterns, or a callable (name, module or parameter) -> whether it is selected; None
# for the default.
Patterns = str | Sequence[str] | Callable[[str, Any], bool] | None


def selected(option: str, patterns: Patterns, named: Mapping[str, Any], what: str) -> set[str]:
    """Return the names that an option selects.

    Raises:
        TypeError: it is no pattern.
        ValueError: a pattern has no match.
    """
    if callable(patterns):
        return {name for name, value in named.items() if patterns(name, value)}
    given = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(given, Iterable) or not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(
            f"{option}={patterns!r}: must be a name, a pattern, a list of them, or a callable "
            f"(name, {what}) -> bool"
        )
    chosen: set[str] = set()
    excluded: set[str] = set()
    for pattern in given:
        matched = {name for name in named if matches(pattern.removeprefix("-"), name)}
        if not matched:
            raise ValueError(
                f"{option}: {pattern!r} matches no {what}; the model has "
                f"{some(list(named), most=20)}"
            )
        (excluded if pattern.startswith("-") else chosen).update(matched)
    return (chosen or set(named)) - excluded


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name, or the name of a module around it."""
    forms = (pattern, name.split(".")), (".".join(_unwrapped(pattern)), _unwrapped(name))
    return any(
        fnmatchcase(".".join(parts[: i + 1]), form)
        for form, parts in forms
        for i in range(len(parts))
    )


def _unwrapped(name: str) -> list[str]:
    """Return the parts of a name that are not of wrappers."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return parts[1:] if parts[0:1] == ["module"] and len(parts) > 1 else parts


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names of a list as text."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
