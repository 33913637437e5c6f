"""The errors that a user can correct.

The message of a `UserError` names the value, the rule and the remedy, in one line for each fault.
The command line prints it and exits with code 2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """An error that the user can correct."""


def require(condition: bool, message: str) -> None:
    """Raise a `UserError` with a message (value, rule and remedy) unless a rule holds."""
    if not condition:
        raise UserError(message)


@contextmanager
def explaining(
    kinds: type[Exception] | tuple[type[Exception], ...],
    message: Callable[[Any], str],
    as_kind: type[UserError] = UserError,
) -> Iterator[None]:
    """Raise errors of some kinds in the block as a `UserError`, whose message is made of them."""
    try:
        yield
    except kinds as error:
        raise as_kind(message(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error without a final colon, or its type if it has no message."""
    lines = (line.strip().removesuffix(":") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
