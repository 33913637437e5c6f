"""Running the jobs whose results are missing.

Each job gets a process of its own: its number of threads is set before any library reads it, no job before it has
touched random numbers or caches, and one that is killed takes no other with it. Results are kept one by one, as they
come. A job that fails is named and its traceback is written to KEY.failed; the others go on.
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

from torch_thor.bench.stores import REMEDY, Store
from torch_thor.training.errors import first_line
from torch_thor.training.output_files import write_whole

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Job(Protocol):
    """One measurement: plain values that can be sent to another process, such as a frozen dataclass of a module."""

    @property
    def key(self) -> str:
        """Its name: the only one of a store, and part of a file's name."""

    def run(self) -> Mapping[str, Any]:
        """Run the job.

        Returns:
            Plain JSON values.
        """


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True)
class Failure:
    """A job that gave no result.

    Args:
        key: Of the job.
        reason: In one line.
        details: The traceback; empty where the process ended without a word.
    """

    key: str
    reason: str
    details: str = ""


def missing(jobs: Sequence[AnyJob], store: Store, *, anew: bool = False) -> list[AnyJob]:
    """List the jobs whose results are missing.

    Args:
        jobs: Any; of equal keys the first counts.
        store: Where results are kept.
        anew: Whether those that are there are to be replaced.

    Returns:
        Those to run, in their order.
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
    """Run what is missing, each job in a process of its own.

    Args:
        jobs: What there shall be.
        store: Where results are kept.
        workers: Processes at a time.
        threads: Of one process.
        anew: Whether to run what is there as well; a result is replaced once its job is done.
        say: Called with a line per job.

    Returns:
        The jobs that failed: nothing is kept of these, and the next call runs them again.
    """
    todo, failures = missing(jobs, store, anew=anew), []
    with closing(_outcomes(todo, workers, threads)) as outcomes:
        for number, (job, outcome) in enumerate(outcomes, start=1):
            note = store.folder / f"{job.key}.failed"
            if isinstance(outcome, Failure):
                failures.append(outcome)
                store.folder.mkdir(parents=True, exist_ok=True)
                write_whole(note, f"{outcome.reason}\n\n{outcome.details}", REMEDY)
                say(f"{number} of {len(todo)} failed: {job.key}: {outcome.reason} ({note})")
            else:
                store.keep(job.key, outcome)
                note.unlink(missing_ok=True)
                say(f"{number} of {len(todo)} done: {job.key}")
    return failures


def complete_here(jobs: Sequence[Job], store: Store, *, say: Callable[[str], None] = print) -> int:
    """Run what is missing, one job after the other in this process; the first error ends it.

    Args:
        jobs: What there shall be.
        store: Where results are kept.
        say: Called with a line per job.

    Returns:
        How many were run.
    """
    todo = missing(jobs, store)
    for number, job in enumerate(todo, start=1):
        store.keep(job.key, job.run())
        say(f"{number} of {len(todo)} done: {job.key}")
    return len(todo)


def _outcomes(jobs: Sequence[Job], workers: int, threads: int) -> Generator[tuple[Job, Mapping[str, Any] | Failure]]:
    """Run jobs side by side and yield what came of each as it ends; closing it ends those that run."""
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(jobs))
    running: dict[Any, tuple[Job, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(job, theirs))
                with _environment(threads):
                    process.start()
                running[ours] = job, process
                theirs.close()  # the child alone holds it now, so that its end can be seen from here
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
    """Take what a process sent before it ended."""
    try:
        received = connection.recv()
    except (EOFError, OSError):  # it sent nothing, or not all of it
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
    """Run a job in a process of its own and send its result as JSON: what is sent is what can be kept."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        connection.send(json.dumps(job.run()))
    except (Exception, SystemExit) as error:
        connection.send(Failure(job.key, f"{type(error).__name__}: {first_line(error)}", traceback.format_exc()))


def _end_with_parent() -> None:
    """End with a parent that was killed: there is no process left to keep the result."""
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
