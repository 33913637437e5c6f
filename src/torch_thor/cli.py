"""The entry point of the command line, which turns a user's errors into lines and exit codes."""

import os
import sys

from torch_thor.errors import StoppedError, UserError, is_first_rank, print_message

# The modules that the extras of pyproject.toml install
EXTRAS = {
    "train": (
        "torchvision", "PIL", "sklearn", "safetensors", "pydantic", "yaml", "filelock", "typer",
        "rich", "matplotlib",
        "tensorboard",
    ),
    "text": ("transformers", "tokenizers", "datasets", "pyarrow", "sentencex"),
    "timm": ("timm",),
}  # fmt: skip
USER_ERROR, INTERRUPTED = 2, 130  # exit codes


def main() -> None:
    """Run a command; exit with 0, 2 (the user can correct the error) or 130 (after a signal)."""
    code = USER_ERROR
    try:
        from torch_thor.commands import app

        app(prog_name="torch-thor")
    except UserError as error:
        said = str(error)
    except StoppedError as stop:  # all processes stop at the same step
        code, said = INTERRUPTED, str(stop) if is_first_rank() else ""
    except ModuleNotFoundError as error:  # commands import what they need when they run
        extra = next((extra for extra, modules in EXTRAS.items() if error.name in modules), None)
        if extra is None:
            raise
        said = f"{error.name} is missing: install it with `pip install 'torch-thor[{extra}]'`"
    except OSError as error:
        if error.filename is None:
            raise
        said = f"{os.fsdecode(error.filename)}: {error.strerror}: check the path and its disk"
    print_message(said)
    sys.exit(code)
