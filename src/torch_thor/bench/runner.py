"""Runs the jobs of a comparison whose results are missing.

Each job runs in a process of its own. So its number of threads is set before any library reads it, random generators
and caches are not changed by earlier jobs, and a job that is killed does not affect the others. Each result is stored
as soon as it is there. If a job fails, its traceback is written to KEY.failed, and the other jobs go on.
"""

import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, TypeVar

from torch_thor.bench.stores import Store, write_whole
from torch_thor.training.errors import first_line

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Job(Protocol):
    """One measurement. It can be pickled and sent to another process, for example as a frozen dataclass of a module."""

    @property
    def key(self) -> str:
        """The name of the job, which is unique in its store and part of a file name."""

    def run(self) -> Mapping[str, Any]:
        """Run the job.

        Returns:
            The result as JSON values.
        """


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True)
class Failure:
    """The failure of a job.

    Args:
        key: The key of the job.
        reason: The reason in one line.
        details: The traceback; empty if the process ended without one.
    """

    key: str
    reason: str
    details: str = ""


def missing(jobs: Sequence[AnyJob], store: Store, *, anew: bool = False) -> list[AnyJob]:
    """List the jobs whose results are missing.

    Args:
        jobs: The jobs of the comparison; of several jobs with the same key the first counts.
        store: The store of their results.
        anew: Whether to list all jobs, so that existing results are replaced.

    Returns:
        The jobs to run, in the given order.
    """
    first: dict[str, AnyJob] = {}
    for job in jobs:
        first.setdefault(job.key, job)
    return [job for key, job in first.items() if anew or not store.holds(key)]


def complete(
    jobs: Sequence[Job],
    store: Store,
    *,
    workers: int,
    threads: int = 1,
    anew: bool = False,
    say: Callable[[str], None] = print,
) -> list[Failure]:
    """Run the jobs whose results are missing, each in a process of its own.

    Args:
        jobs: The jobs of the comparison.
        store: The store of their results.
        workers: The number of processes at a time.
        threads: The number of threads of each process.
        anew: Whether to run all jobs; an existing result is replaced when its job is done.
        say: Called with one line of text per job.

    Returns:
        The failures. The store has no results of these jobs, so the next call runs them again.
    """
    todo, failures = missing(jobs, store, anew=anew), []
    with closing(_outcomes(todo, workers, threads)) as outcomes:
        for number, (job, outcome) in enumerate(outcomes, start=1):
            note = store.folder / f"{job.key}.failed"
            if isinstance(outcome, Failure):
                failures.append(outcome)
                store.folder.mkdir(parents=True, exist_ok=True)
                write_whole(note, f"{outcome.reason}\n\n{outcome.details}")
                say(f"{number} of {len(todo)} failed: {job.key}: {outcome.reason} ({note})")
            else:
                store.keep(job.key, outcome)
                note.unlink(missing_ok=True)
                say(f"{number} of {len(todo)} done: {job.key}")
    return failures


def complete_here(jobs: Sequence[Job], store: Store, *, say: Callable[[str], None] = print) -> int:
    """Run the jobs whose results are missing one after the other in this process, up to the first error.

    Args:
        jobs: The jobs of the comparison.
        store: The store of their results.
        say: Called with one line of text per job.

    Returns:
        The number of jobs that were run.
    """
    todo = missing(jobs, store)
    for number, job in enumerate(todo, start=1):
        store.keep(job.key, job.run())
        say(f"{number} of {len(todo)} done: {job.key}")
    return len(todo)


def _outcomes(jobs: Sequence[Job], workers: int, threads: int) -> Generator[tuple[Job, Mapping[str, Any] | Failure]]:
    """Run jobs in parallel, and yield the outcome of each when it ends; closing the generator ends running jobs."""
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(jobs))
    running: dict[Any, tuple[Job, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(job, sender))
                with _environment(threads):
                    process.start()
                running[receiver] = job, process
                sender.close()  # only the child holds it now, so that the receiver notices when the child ends
            for connection in wait(list(running)):
                job, process = running[connection]
                outcome = _outcome(connection, job, process)
                del running[connection]
                yield job, outcome
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _outcome(connection: Any, job: Job, process: SpawnProcess) -> Mapping[str, Any] | Failure:
    """Receive the outcome of a job from its process."""
    try:
        received = connection.recv()
    except (EOFError, OSError):  # it has sent nothing, or only a part
        received = None
    connection.close()
    process.join()
    if received is None:
        return Failure(job.key, _ending(process.exitcode or 0))
    if isinstance(received, Failure):
        return received
    result: dict[str, Any] = json.loads(received)
    return result


def _ending(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}: where memory ran out, give fewer --workers"
    return f"its process ended with exit code {code} and no result"


def _work(job: Job, connection: Connection) -> None:
    """Run a job in a child process and send its result, as JSON so that it is known to be storable."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        connection.send(json.dumps(job.run()))
    except (Exception, SystemExit) as error:
        connection.send(Failure(job.key, f"{type(error).__name__}: {first_line(error)}", traceback.format_exc()))


def _end_with_parent() -> None:
    """End this process when its parent has been killed, because nothing can store the result any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Set the number of threads in the environment that child processes inherit."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
