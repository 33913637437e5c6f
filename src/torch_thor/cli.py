"""The entry point of the command line, which runs a command.

It turns errors into lines and an exit code.
"""

import errno
import os
import sys

from torch_thor.errors import UserError
from torch_thor.printing import is_first_rank, print_message
from torch_thor.training.errors import CTRL_C, INTERRUPTED, USER_ERROR, ElsewhereError, StoppedError

# The modules that the extras of pyproject.toml install
EXTRAS = {
    "train": (
        "torchvision", "PIL", "sklearn", "safetensors", "pydantic", "yaml", "filelock", "typer",
        "rich", "matplotlib",
        "tensorboard",
    ),
    "text": ("transformers", "tokenizers", "datasets", "pyarrow", "bs4", "sentencex"),
    "timm": ("timm",),
}  # fmt: skip
# Errors of a disk, a network share or a limit on open files, which are not bugs of this program
OUTSIDE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
}


def _typer_error(error: Exception) -> tuple[int, str] | None:
    """Return exit code and text of typer's errors of usage and of Ctrl-C; None for others."""
    # They are told by what they have, because typer has moved their classes more than once.
    if type(error).__name__ == "Abort":
        return INTERRUPTED, CTRL_C if is_first_rank() else ""
    if not hasattr(error, "format_message"):
        return None
    command = getattr(getattr(error, "ctx", None), "command_path", "torch-thor")
    usage = error.format_message().removesuffix(".")
    return USER_ERROR, f"{usage}: `{command} --help` says what is there"


def _open_closed_streams() -> None:
    """Let the standard streams that a caller has closed (`>&-`) lead nowhere.

    Else the next files that are opened would take their numbers.
    """
    number = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    while number <= 2:
        number = os.dup(number)
    os.close(number)
    # Python has None in their place; they are open for as long as the process lives
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def main() -> None:
    """Run a command; exit with 0, 2 (the user can correct the error) or 130 (after a signal)."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # The terminal may not be able to encode all characters.
            stream.reconfigure(errors="backslashreplace")
    code = USER_ERROR
    try:
        from torch_thor.commands import app

        raise SystemExit(app(prog_name="torch-thor", standalone_mode=False))
    except UserError as error:
        said = "" if isinstance(error, ElsewhereError) else str(error)
    except ModuleNotFoundError as error:  # commands import what they need when they run
        extra = next((extra for extra, modules in EXTRAS.items() if error.name in modules), None)
        if extra is None:
            raise
        said = f"{error.name} is missing: install it with `pip install 'torch-thor[{extra}]'`"
    except (StoppedError, KeyboardInterrupt, SystemExit) as stop:
        code = getattr(stop, "code", INTERRUPTED)
        if code != INTERRUPTED:
            raise
        # all processes stop at the same step
        said = (
            "" if not is_first_rank() else str(stop) if isinstance(stop, StoppedError) else CTRL_C
        )
    except OSError as error:
        if error.filename is None and error.errno not in OUTSIDE:
            raise
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        said = f"{where}{error.strerror}: check the path, its permissions and its disk"
    except Exception as error:
        of_typer = _typer_error(error)
        if of_typer is None:
            raise
        code, said = of_typer
    print_message(said)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
