"""Update intervals in state dicts: a schedule is stored as its repr, and made again from that text.

A state dict contains no functions. For an interval that is any other callable it contains a placeholder, and the
optimizer that loads it keeps its own interval.
"""

import ast
from collections.abc import Callable
from typing import Any

from torch_thor.intervals import Constant, Geometric, Piecewise, UpdateInterval
from torch_thor.optim.parameters import Group

CALLABLE = "callable"  # stored for a callable that is not a schedule of this package

_KNOWN: dict[str, type[Constant | Piecewise | Geometric]] = {
    cls.__name__: cls for cls in (Constant, Piecewise, Geometric)
}


def to_plain(interval: int | Callable[[int], int]) -> int | str:
    """Return an interval in the form in which a state dict stores it."""
    if not callable(interval):
        return interval
    return repr(interval) if type(interval) in _KNOWN.values() else CALLABLE


def from_plain(plain: Any) -> Any:
    """Return the interval that :func:`to_plain` was given. The text of a schedule is parsed and not executed."""
    if not isinstance(plain, str) or plain == CALLABLE:
        return plain
    try:
        call = ast.parse(plain, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a call of a class with keywords")
        return _KNOWN[call.func.id](**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    except (SyntaxError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"update_interval={plain!r} in the state dict is no schedule of this version, which knows "
            f"{', '.join(_KNOWN)}; set group['update_interval'] in the state dict to a whole number or to one of them"
        ) from error


def plain_group(group: Group) -> Group:
    """Return a parameter group in the form in which a state dict stores it."""
    return {**group, "update_interval": to_plain(group["update_interval"])}


def loaded_interval(saved: Group, own: UpdateInterval) -> UpdateInterval:
    """Return the interval to use after a state dict was loaded."""
    interval: UpdateInterval | str = from_plain(saved.get("update_interval", own))
    is_unstored = callable(own) and to_plain(own) == CALLABLE
    return own if is_unstored or isinstance(interval, str) else interval
