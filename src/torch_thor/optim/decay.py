"""Selects the parameters to which weight decay applies, by a callable or by patterns of names."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torch_thor.capture.selection import self_and_parents
from torch_thor.optim.checks import require
from torch_thor.optim.gradient_checks import some

LEAVES_OUT = "-"  # in front of a pattern: the parameters that match it do not decay

# A callable (name, parameter) -> whether it decays; one or more patterns; or None for every parameter.
DecayFilter = Callable[[str, nn.Parameter], bool] | str | Sequence[str] | None


class DecayPatterns:
    """A decay filter that selects parameters by patterns of names."""

    def __init__(self, patterns: Iterable[str], model: nn.Module) -> None:
        self.patterns = tuple(patterns)
        names: dict[int, list[str]] = {}  # a shared parameter has several
        # nn.Module's own method, because modules may override it with fewer arguments
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        every = [name for aliases in names.values() for name in aliases]
        for pattern in self.patterns:
            require(
                "decay_filter",
                pattern,
                _matches(pattern.removeprefix(LEAVES_OUT), every),
                "a pattern that matches a parameter",
                f"the model has {some(every, most=20)}",
            )
        # cached, because every step asks, and matching patterns takes longer than the update of a small layer
        self._known = {name: self._admits(aliases) for aliases in names.values() for name in aliases}

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether weight decay applies to a parameter."""
        if name not in self._known:  # its layer was added later
            self._known[name] = self._admits([name])
        return self._known[name]

    def _admits(self, names: Sequence[str]) -> bool:
        left_out = [p.removeprefix(LEAVES_OUT) for p in self.patterns if p.startswith(LEAVES_OUT)]
        admitted = [p for p in self.patterns if not p.startswith(LEAVES_OUT)]
        if any(_matches(pattern, names) for pattern in left_out):
            return False
        return not admitted or any(_matches(pattern, names) for pattern in admitted)


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(part, pattern) for name in names for part in self_and_parents(name))


def decay_filter_of(value: Any, model: nn.Module) -> Callable[[str, nn.Parameter], bool] | None:
    """Return the filter for a value of the option ``decay_filter``."""
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]
    patterns = [value] if isinstance(value, str) else value
    several = isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns)
    require(
        "decay_filter",
        value,
        several and len(patterns) > 0,
        "None, a pattern, a list of patterns or a callable (name, parameter) -> bool",
        'pass, for example, ["*.weight", "-*norm*"], or lambda name, parameter: parameter.dim() > 1',
    )
    return DecayPatterns(patterns, model)
