"""Messages on stderr, from one process or from several that `torchrun` has started."""

import os
import sys

from torch_thor.training.printing import visible


def is_first_rank() -> bool:
    """Return whether this is the only process, or the one with rank 0.

    Returns:
        True on rank 0, and without `torchrun`.
    """
    return os.environ.get("RANK", "0") == "0"  # torchrun sets it


def print_message(line: str) -> None:
    """Print a line on stderr, with the rank of the process if it is not 0.

    Args:
        line: The message.
    """
    rank = "" if is_first_rank() else f", rank {os.environ['RANK']}"
    sys.stderr.write(f"torch-thor{rank}: {visible(line)}\n")
