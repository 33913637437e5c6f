"""Options of benchmarks, whose errors are one line each."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import NoReturn

from torch_thor.errors import UserError


class Parser(ArgumentParser):
    """A parser of options that raises a `UserError` for bad ones."""

    def error(self, message: str) -> NoReturn:
        """Refuse an option."""
        raise UserError(f"{message}: `{self.prog} --help` says what is there")


def whole_numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return what reads whole numbers between commas, none of them below the least."""

    def read(text: str) -> tuple[int, ...]:
        words = text.split(",")
        if not all(word.isdecimal() and int(word) >= least for word in words):
            rule = f"must be whole numbers of at least {least}, separated by commas"
            raise ArgumentTypeError(f"{text}: {rule}")
        return tuple(map(int, words))

    return read
