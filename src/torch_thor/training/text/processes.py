"""Worker processes for preparing text, which return the results in the order of the jobs."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from torch_thor.training.errors import UserError


@dataclass(frozen=True)
class Job:
    """One call of the function that the worker processes execute.

    Args:
        tag: Any value that identifies the job; it is returned with the result.
        arguments: The arguments of the call.
        done: The result, if it is already known. The function is then not called.
    """

    tag: Any
    arguments: tuple[Any, ...] = ()
    done: Any = None


def results(work: Callable[..., Any], jobs: Iterable[Job], workers: int) -> Iterator[tuple[Any, Any]]:
    """Run jobs. Few of them are pending at a time, so that the memory use does not depend on the number of jobs.

    The processes exit after the last job, so that their memory is released before the next stage starts.

    Args:
        work: The function that is called with the arguments of each job.
        jobs: The jobs.
        workers: The number of processes to start. With 1, no process is started, and this process runs the jobs.

    Yields:
        The tag and the result of each job, in the order of the jobs.

    Raises:
        UserError: If a worker process was terminated from outside.
    """
    waiting = iter(jobs)
    if workers == 1:
        for job in waiting:
            yield job.tag, work(*job.arguments) if job.done is None else job.done
        return
    running: deque[tuple[Job, Future[Any] | None]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool:
        try:
            while True:
                while len(running) < 2 * workers and (new := next(waiting, None)) is not None:
                    running.append((new, pool.submit(work, *new.arguments) if new.done is None else None))
                if not running:
                    return
                job, future = running.popleft()
                yield job.tag, job.done if future is None else future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares text was ended from outside (was memory short?): give the same command "
                "again, it goes on with what is missing; fewer --workers need less memory"
            ) from error
        finally:
            for _, future in running:
                if future is not None:
                    future.cancel()


def _start() -> None:
    """Initialise a worker process.

    It exits when its parent process has ended, because it would otherwise wait for jobs forever. The library
    `tokenizers` is limited to one thread.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
