"""The end of several processes of which one has failed or was killed, while the others communicated with it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch_thor.training.errors import ElsewhereError, UserError, first_line

QUIET = 8.0  # seconds without a new answer, after which the processes that have not answered count as lost
_PAUSE, _WATCH = 0.05, 0.5  # seconds between two looks into the store, of one that asks and of one that may be asked
_QUESTION, _SPEAKERS = "question", "speakers"
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


def report(store: Any, rank: int, error: BaseException) -> None:
    """Tell the other processes why this one ends, in case that they lose their connections with it.

    Args:
        store: The store, as in `end_together`.
        rank: The rank of this process.
        error: The exception that ends this process.
    """
    with suppress(RuntimeError, OSError):  # the store is gone too
        store.set(str(rank), first_line(error))


def end_together(store: Any, rank: int, world: int, error: BaseException, disconnect: Callable[[], None]) -> None:
    """Find out which process is gone, and let one of the others say so.

    Args:
        store: The store of the process group, which is alive as long as `torchrun` is.
        rank: The rank of this process.
        world: The number of processes.
        error: The exception that ends this process.
        disconnect: Closes the connections of this process, so that those that wait for it end too.

    Raises:
        UserError: On the first process that has found out; the message names the process that is gone.
        ElsewhereError: On all others that have lost a connection.
    """
    lost = is_lost_connection(error)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, which kills this process if it does not end soon
    try:
        store.set(str(rank), "" if lost else first_line(error))
        disconnect()
        if not lost:
            return
        store.set(_QUESTION, "")
        alive, failed = _answers(store, world)
        first = store.add(_SPEAKERS, 1) == 1
    except (RuntimeError, OSError):  # the store is gone too
        return
    gone = [other for other in range(world) if other not in alive]
    if gone:
        said = f"rank {', '.join(map(str, gone))} of {world} processes no longer answers, as if it was killed"
    elif failed:
        said = "; ".join(f"rank {other} has failed: {text}" for other, text in failed.items())
    else:
        said = f"the processes have lost their connections ({first_line(error)})"
    message = f"{said}; the others end too, and --resume continues from the newest complete checkpoint"
    raise (UserError if first else ElsewhereError)(message) from error


@contextmanager
def answering(store: Any, rank: int) -> Iterator[None]:
    """Answer while the block runs if another process asks which ones are alive.

    A thread answers, because a process that communicates with others than the one that is gone may wait for them until
    they have ended.

    Args:
        store: The store, as in `end_together`.
        rank: The rank of this process.

    Yields:
        Nothing.
    """
    own, ended = store.clone(), threading.Event()  # a connection of its own: the others may be waiting for a key

    def answer() -> None:
        with suppress(RuntimeError, OSError):  # the store is gone
            while not own.check([_QUESTION]):
                if ended.wait(_WATCH):
                    return
            own.set(_alive(rank), "")

    thread = threading.Thread(target=answer, name="torch-thor-answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * _WATCH)
        with suppress(RuntimeError, OSError):
            own.set(_alive(rank), "")  # it ends by itself


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _answers(store: Any, world: int) -> tuple[set[int], dict[int, str]]:
    """Wait until no more processes answer: those that do, and what has failed on those that have said so."""
    alive: set[int] = set()
    failed: dict[int, str] = {}
    latest = time.monotonic()
    while len(alive) < world and time.monotonic() < latest + QUIET:
        for other in set(range(world)) - alive:
            if store.check([str(other)]):
                text = store.get(str(other)).decode()
                failed |= {other: text} if text else {}
            elif not store.check([_alive(other)]):
                continue
            alive.add(other)
            latest = time.monotonic()
        time.sleep(_PAUSE)
    return alive, failed
