"""Worker processes for preparing text, which return the results in the order of the jobs."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from torch_thor.training.errors import UserError


def in_order(work: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """Call a function with the arguments of each job, of which few are taken at a time: they may need much memory."""
    if workers == 1:
        yield from (work(*job) for job in jobs)
        return
    pending: deque[Future[Any]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool:
        try:
            for job in jobs:
                pending.append(pool.submit(work, *job))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares text was ended from outside (was memory short?): give the same command "
                "again, it goes on with what is missing; fewer --workers need less memory"
            ) from error
        finally:
            for future in pending:
                future.cancel()


def _start() -> None:
    """Let a worker end with its parent process, for whose jobs it would otherwise wait for ever, and not by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
