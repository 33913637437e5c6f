"""Processes that work for another one."""

import os
import signal
import threading
from functools import cache
from typing import Any


@cache
def end_with_parent(parent: Any) -> None:
    """Let this process end with its parent process, and not by Ctrl-C; None is no parent."""
    # Otherwise it would wait for jobs of the parent for ever.
    if parent is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
