"""Processes that work for another one."""

import os
import signal
import threading
import time
from functools import cache


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
