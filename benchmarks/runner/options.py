"""Options of benchmarks, whose errors are one line each."""

from argparse import ArgumentParser
from typing import NoReturn

from torch_thor.errors import UserError


class Parser(ArgumentParser):
    """A parser of options that raises a `UserError` for bad ones."""

    def error(self, message: str) -> NoReturn:
        """Refuse an option."""
        raise UserError(f"{message}: `{self.prog} --help` says what is there")
