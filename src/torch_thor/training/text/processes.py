"""Worker processes that prepare text: a few jobs at a time, results in the order of the jobs."""

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
    """A call of a function that worker processes know.

    Args:
        tag: Given back with the result.
        arguments: Of the call.
        done: The result, where it is there from before: nothing is called.
    """

    tag: Any
    arguments: tuple[Any, ...] = ()
    done: Any = None


def results(work: Callable[..., Any], jobs: Iterable[Job], workers: int) -> Iterator[tuple[Any, Any]]:
    """Run jobs, few at a time, so that memory does not depend on how many there are.

    The processes end with the jobs: what the next stage of the work needs is not added to what this one has left.

    Args:
        work: What is called with a job's arguments.
        jobs: The jobs.
        workers: Processes to start; 1 starts none, and runs the jobs here.

    Yields:
        Tag and result of each job, in the order of the jobs.

    Raises:
        UserError: If a worker process was ended from outside.
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
    """Prepare a worker process.

    It ends when the process that started it has gone: it would wait for work for ever. It uses one thread.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
