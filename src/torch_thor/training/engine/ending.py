"""The end of several processes of which one has failed or was killed, while the others communicated with it."""

import atexit
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch_thor.training.errors import ElsewhereError, UserError, first_line

QUIET = 5.0  # seconds without a new report, after which the processes that have not reported count as lost
_PAUSE = 0.05
_GRACE = 5.0  # seconds in which the main thread may end by itself when a process is gone
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

    The main thread may wait where no connection is lost, and without end. `torchrun` sends SIGTERM to all processes
    when one has been killed. So at this signal the thread asks who is still there. If a process is gone, and the main
    thread does not end by itself, the thread ends this process.

    Args:
        store: As in `end_together`.
        rank: The rank of this process.
        world: The number of processes.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="torch-thor-answers", daemon=True)
        self._signals, self._wakeup = socket.socketpair()  # receives the numbers of signals, when they arrive
        self._before = -1
        self._listens = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Answers":
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        if self._listens:
            self._before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._listens:
            signal.set_wakeup_fd(self._before)
        for end in (self._signals, self._wakeup):
            end.close()
        with suppress(RuntimeError, OSError):  # the store is gone
            self._store.set(_alive(self._rank), "")  # it ends by itself

    def _answer(self) -> None:
        answered = False
        try:
            while not self._stop.wait(_ANSWER):
                if not answered and self._store.check([_BEGUN]):
                    self._store.set(_alive(self._rank), "")
                    answered = True
                if self._is_terminated():
                    self._store.set(_alive(self._rank), "")
                    self._store.set(_BEGUN, "")
                    self._leave_if_a_rank_is_gone()
                    return
        except (RuntimeError, OSError):  # the store is gone
            return

    def _is_terminated(self) -> bool:
        try:
            return signal.SIGTERM in self._signals.recv(4096)
        except BlockingIOError:
            return False

    def _leave_if_a_rank_is_gone(self) -> None:
        reports = _reports(self._store, self._world)
        if len(reports) == self._world or self._stop.wait(_GRACE):
            return  # everyone is there, so somebody has stopped the training; or the main thread has come to an end
        if self._store.add(_SPEAKER, 1) == 1:
            message = f"torch-thor, rank {self._rank}: {_what_happened(reports, self._world, '')}"
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{message}\n")
        leave()


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


def leave() -> None:
    """End this process without destructors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it is closed
            stream.flush()
    os._exit(1)


def leave_at_exit() -> None:
    """Let this process end without destructors, when everything has been written.

    That of a process group may wait for ever for a process that is gone, and `torchrun` would wait for this one. The
    others lose their connections with it then, so that those that still wait for it end too.
    """
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
    raise (UserError if speaks else ElsewhereError)(_what_happened(reports, world, first_line(error))) from error


def _what_happened(reports: Mapping[int, str], world: int, error: str) -> str:
    """Return the message of the process that speaks."""
    gone = [other for other in range(world) if other not in reports]
    failed = {other: text for other, text in reports.items() if text}
    if gone:
        said = f"rank {', '.join(map(str, gone))} of {world} processes no longer answers, as if it was killed"
    elif failed:
        said = "; ".join(f"rank {other} has failed: {text}" for other, text in failed.items())
    else:
        said = f"the processes have lost their connections ({error})"
    return f"{said}; the others end too, and --resume continues from the newest complete checkpoint"


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
