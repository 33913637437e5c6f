"""The end of several processes of which one has failed or was killed, while the others communicated with it."""

import atexit
import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from torch_thor.training.errors import ElsewhereError, UserError, first_line

QUIET = 5.0  # seconds without a new report, after which the processes that have not reported count as lost
_PAUSE = 0.05
_ANSWER = 0.5  # seconds between two looks whether another process has reported
_BEGUN, _SPEAKER = "begun", "speaker"  # keys in the store beside the ranks
# in messages of gloo and NCCL for a connection whose other end is gone
_SIGNS = (
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "gloo/transport",
    "remote process exited", "socket closed", "nccl error", "connection was likely closed",
)  # fmt: skip


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an exception says that another process is gone.

    Args:
        error: The exception.

    Returns:
        True for the messages of gloo and NCCL about connections, also of a cause of the exception.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if any(sign in str(error).lower() for sign in _SIGNS):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


class Answers:
    """A thread that answers for a process whose main thread still waits for the process that is gone.

    Args:
        store: As in `end_together`.
        rank: The rank of this process.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="torch-thor-answers", daemon=True)

    def __enter__(self) -> "Answers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(RuntimeError, OSError):  # the store is gone
            self._store.set(_alive(self._rank), "")  # it ends by itself

    def _answer(self) -> None:
        try:
            while not self._stop.wait(_ANSWER):
                if self._store.check([_BEGUN]):
                    self._store.set(_alive(self._rank), "")
                    return
        except (RuntimeError, OSError):  # the store is gone
            return


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def report(store: Any, rank: int, error: BaseException) -> None:
    """Tell the other processes why this one ends, in case that they lose their connections with it.

    Args:
        store: As in `end_together`.
        rank: The rank of this process.
        error: The exception that ends this process.
    """
    with suppress(RuntimeError, OSError):  # the store is gone too
        store.set(str(rank), first_line(error))


def leave_at_exit() -> None:
    """Let this process end without destructors, when everything has been written.

    That of a process group may wait for ever for a process that is gone, and `torchrun` would wait for this one. The
    others lose their connections with it then, so that those that still wait for it end too.
    """

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # it is closed
                stream.flush()
        os._exit(1)

    gc.disable()  # which could destroy a process group before that
    atexit.register(leave)


def end_together(store: Any, rank: int, world: int, error: BaseException) -> None:
    """Find out which process is gone, and let one of the others say so.

    Args:
        store: The store of the process group, which is alive as long as `torchrun` is.
        rank: The rank of this process.
        world: The number of processes.
        error: The exception that ends this process.

    Raises:
        UserError: On one process that has lost a connection; the message names the process that is gone.
        ElsewhereError: On all others that have lost a connection.
    """
    lost = is_lost_connection(error)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, which kills this process if it does not end soon
    try:
        store.set(str(rank), "" if lost else first_line(error))
        store.set(_BEGUN, "")
        reports = _reports(store, world) if lost else {}
        speaks = lost and store.add(_SPEAKER, 1) == 1
    except (RuntimeError, OSError):  # the store is gone too
        return
    if not lost:
        return
    gone = [other for other in range(world) if other not in reports]
    failed = {other: text for other, text in reports.items() if text}
    if gone:
        said = f"rank {', '.join(map(str, gone))} of {world} processes no longer answers, as if it was killed"
    elif failed:
        said = "; ".join(f"rank {other} has failed: {text}" for other, text in failed.items())
    else:
        said = f"the processes have lost their connections ({first_line(error)})"
    message = f"{said}; the others end too, and --resume continues from the newest complete checkpoint"
    raise (UserError if speaks else ElsewhereError)(message) from error


def _reports(store: Any, world: int) -> dict[int, str]:
    """Wait until no more processes report how they end."""
    found: dict[int, str] = {}
    latest = time.monotonic()
    while len(found) < world and time.monotonic() < latest + QUIET:
        for other in range(world):
            if other in found:
                continue
            if store.check([str(other)]):
                found[other] = store.get(str(other)).decode()
            elif store.check([_alive(other)]):
                found[other] = ""
            if other in found:
                latest = time.monotonic()
        time.sleep(_PAUSE)
    return found
