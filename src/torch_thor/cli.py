"""The entry point of the command line: it runs a command, and turns errors into lines and an exit code."""

import errno
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Any

from torch_thor import __version__
from torch_thor.training.errors import CTRL_C, INTERRUPTED, USER_ERROR, ElsewhereError, StoppedError, UserError

# The modules that the extras of pyproject.toml install
EXTRAS = {
    "train": (
        "torchvision", "PIL", "sklearn", "safetensors", "pydantic", "yaml", "filelock", "typer", "rich", "matplotlib",
        "tensorboard",
    ),
    "text": ("transformers", "tokenizers", "pyarrow", "mwparserfromhell", "bs4", "sentencex"),
    "timm": ("timm",),
}  # fmt: skip
# Errors of a disk, a network share or a limit on open files, which are not bugs of this program
OUTSIDE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}


def _to_install(error: ModuleNotFoundError) -> str:
    """Say which extra has a missing module; raise the error again if none has it, such as one of the user's."""
    extra = next((extra for extra, modules in EXTRAS.items() if error.name in modules), None)
    if extra is None:
        raise error
    return f"{error.name} is missing: install it with `pip install 'torch-thor[{extra}]'`"


try:
    import typer
    from typer.core import TyperGroup

    from torch_thor import commands
    from torch_thor.training.printing import is_first_rank, print_message
except ModuleNotFoundError as error:
    raise SystemExit(f"torch-thor: {_to_install(error)}") from error
except KeyboardInterrupt:
    sys.stderr.write(f"torch-thor: {CTRL_C}\n")
    raise SystemExit(INTERRUPTED) from None


class _InterruptedError(Exception):
    """A KeyboardInterrupt, which typer would otherwise handle itself."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _InterruptedError from error


app = typer.Typer(
    name="torch-thor",
    cls=_Commands,
    help="Train networks with THOR, the trace-based natural-gradient optimizer, and compare it with other optimizers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for name, command in (
    ("train", commands.train), ("eval", commands.evaluate), ("prepare", commands.prepare), ("export", commands.export),
    ("split-dim", commands.split_dim), ("plan", commands.plan), ("figures", commands.figures), ("keys", commands.keys),
):  # fmt: skip
    app.command(name)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torch-thor {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


@app.callback()
def _options(version: Version = False) -> None:
    pass


def main() -> None:
    """Run the command line. The exit code is 0, 2 (an error that the user can correct) or 130 (stopped by a signal).

    Raises:
        SystemExit: At the end of every command.
        ModuleNotFoundError: If none of the extras installs the module.
        OSError: If it does not concern a file or a disk, and so is a bug of this program.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot encode
    try:
        app()
    except UserError as error:
        if not isinstance(error, ElsewhereError):
            print_message(str(error))
        raise SystemExit(USER_ERROR) from error
    except ModuleNotFoundError as error:  # commands import what they need when they run
        print_message(_to_install(error))
        raise SystemExit(USER_ERROR) from error
    except (StoppedError, _InterruptedError) as stop:
        if is_first_rank():  # all processes stop at the same step
            print_message(str(stop) or CTRL_C)
        raise SystemExit(INTERRUPTED) from stop
    except OSError as error:
        if error.filename is None and error.errno not in OUTSIDE:
            raise
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        print_message(f"{where}{error.strerror}: check the path, its permissions and its disk")
        raise SystemExit(USER_ERROR) from error


if __name__ == "__main__":
    main()
