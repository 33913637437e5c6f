"""Which parameters decay: all of them, those that a callable admits, or those that patterns name."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torch_thor.capture.selection import self_and_parents
from torch_thor.optim.checks import require
from torch_thor.optim.thor.gradient_checks import some

LEAVES_OUT = "-"  # in front of a pattern: what it matches does not decay

# (name, parameter) -> whether it decays; patterns; None for every parameter
DecayFilter = Callable[[str, nn.Parameter], bool] | str | Sequence[str] | None


class DecayPatterns:
    """Admits parameters by name, as patterns say.

    A parameter decays if one of the patterns matches it (or there are none but those with a minus), and none of those
    with a minus in front does. A pattern that matches a module's name matches every parameter in it.

    Args:
        patterns: as :mod:`fnmatch` has them, case counts: ``"*.weight"``, ``"-*bn*"``, ``"head"``.
        model: the model.

    Raises:
        ValueError: a pattern matches no parameter of the model.
    """

    def __init__(self, patterns: Iterable[str], model: nn.Module) -> None:
        self.patterns = tuple(patterns)
        names: dict[int, list[str]] = {}  # a shared parameter has several
        for name, parameter in model.named_parameters(remove_duplicate=False):
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
        # looked up in every step: matching would cost more than a small layer's update
        self._known = {name: self._admits(aliases) for aliases in names.values() for name in aliases}

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        """Say whether a parameter decays.

        Args:
            name: its name.
            parameter: makes no difference.

        Returns:
            True if it does.
        """
        if name not in self._known:  # of a layer that was added later
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
    """Make a filter of what a user gave.

    Args:
        value: None, a callable, a pattern or several.
        model: the model.

    Returns:
        A callable ``(name, parameter) -> bool``, or None where every parameter decays.
    """
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
