"""Processes that work for another one."""

import os
import signal
import tempfile
import threading
import time
from functools import cache

from torch_thor.errors import require

# Workers talk through sockets in a folder of their own there. The system allows their paths 107
# bytes, and `/pymp-xxxxxxxx/listener-xxxxxxxx` has 32.
_LONGEST = 75


def check_temporary_folder(remedy: str) -> None:
    """Refuse a folder of temporary files in which workers cannot make their sockets.

    Each of them would print a traceback, and this process might wait for ever.
    """
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    require(
        length <= _LONGEST,
        f"TMPDIR={folder} has {length} bytes, and the sockets of worker processes allow it "
        f"{_LONGEST}: set TMPDIR to a shorter path, or {remedy}",
    )


@cache
def end_children_with_me() -> None:
    """Let processes that are forked from now on end when this one does, and not by Ctrl-C.

    Otherwise they would wait for jobs of this one for ever if it was killed.
    """
    parent = os.getpid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    def begin() -> None:
        if os.getppid() == parent:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            threading.Thread(target=watch, daemon=True).start()

    os.register_at_fork(after_in_child=begin)
