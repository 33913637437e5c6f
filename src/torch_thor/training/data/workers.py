"""The processes that make batches: their signals, their end with the training, and the error when one of them dies."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from torch_thor.training.config.data_spec import Workers
from torch_thor.training.errors import UserError

GRACE = 5.0  # seconds that a process that was killed may take to be gone
PAUSE = 1.0  # seconds between two looks of a worker at whether its training process is alive
MORE_SHARED_MEMORY = (
    "enlarge /dev/shm (docker run --shm-size=8g), or use fewer data.workers.count, fewer data.workers.prefetch or a "
    "smaller batch_size"
)
_REMEDIES = {
    "SIGBUS": f"shared memory was most likely full: {MORE_SHARED_MEMORY}",
    "SIGKILL": "memory was most likely full: use fewer data.workers.count or fewer data.workers.prefetch",
}


def check_workers(workers: Workers, processes: int, say: Callable[[str], None]) -> None:
    """Warn where there are more workers than cores.

    Args:
        workers: Of each training process.
        processes: Training processes on this machine.
        say: Told, in one line.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = workers.count * processes
    if total > cores:
        each = f"workers={workers.count}" + (f" on each of {processes} processes" if processes > 1 else "")
        say(f"{each}: {total} worker processes share {cores} cores; {cores // processes} or fewer would do")


class DeathWatch:
    """Says in one line that a worker has died: where its batches are waited for, and nowhere else.

    torch's own handler of SIGCHLD raises in the middle of anything, a step or another error's message, and once more
    for each further worker that dies. Without it a loader that waits looks after its workers every five seconds.
    """

    def __init__(self) -> None:
        self.workers: list[BaseProcess] = []

    def start(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin an iteration, the first of which starts the workers, and undo torch's handler.

        Args:
            loader: Of persistent workers, or of none.

        Returns:
            The iterator.

        Raises:
            UserError: If the workers cannot be started, or one has died.
        """
        handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
        try:
            if loader.num_workers and not self.workers:
                _try_semaphores(loader.num_workers)
            with self.waiting():
                batches = iter(loader)
        except OSError as error:  # no memory, no process, no semaphore left
            count, reason = loader.num_workers, error.strerror or error
            raise UserError(
                f"data.workers.count={count}: the worker processes cannot be started ({reason}): use fewer, or 0 to "
                "read in the training process"
            ) from error
        finally:
            if handler is not None and threading.current_thread() is threading.main_thread():  # else torch set none
                signal.signal(signal.SIGCHLD, handler)
        self.workers = list(getattr(batches, "_workers", ()))  # torch has no other handle to them
        return batches

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell of a dead worker in the place of what it makes the block raise.

        Yields:
            For the block.

        Raises:
            RuntimeError: As the block raises it, where all workers are alive.
            OSError: Likewise.
            EOFError: Likewise.
        """
        self._check()
        try:
            yield
        except (RuntimeError, OSError, EOFError):
            if self.workers:  # of a process that ends its connections go first, then its sentinel, then itself
                ending = connection.wait([worker.sentinel for worker in self.workers], timeout=GRACE)
                for worker in self.workers:
                    if worker.sentinel in ending:
                        worker.join()
            self._check()
            raise

    def _check(self) -> None:
        codes = [worker.exitcode for worker in self.workers if worker.exitcode is not None]
        if codes:
            how = signal.Signals(-codes[0]).name if codes[0] < 0 else f"exit code {codes[0]}"
            remedy = _REMEDIES.get(how, "with data.workers.count=0 the training process shows what happens")
            raise UserError(f"a worker process has died ({how}): {remedy}; go on with --resume")


def _try_semaphores(count: int) -> None:
    # As many as the workers' queues will have. torch's iterator, left half made, would add a traceback of its own.
    _ = [multiprocessing.Lock() for _ in range(4 * (count + 2))]


def start_worker(_: int) -> None:
    """Prepare a worker: it ends with its training process, and at its word alone.

    What to do when a signal asks to stop is the training process's business, and a checkpoint needs its workers alive:
    without them the next batch is an error. Ctrl-C reaches every process of a terminal; `torchrun`, `timeout` and the
    schedulers of clusters send SIGTERM to all processes of a job.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(
        signal, "sigtimedwait"
    ):  # it tells who sent the signal; macOS has none, and there torch's own watch is left
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_training, args=(os.getppid(),), daemon=True).start()


def _end_with_training(started_by: int) -> None:
    # A thread: torch's own watch is not kept while an image is read, and a disk may keep a worker waiting for ever.
    # Where processes are forked from a server, that is what started this one: it ends with the training process.
    training = multiprocessing.parent_process()
    while training is not None and training.is_alive() and os.getppid() == started_by:
        told = signal.sigtimedwait({signal.SIGTERM}, PAUSE)
        if told is not None and told.si_pid == training.pid:
            break
    os._exit(0)  # as torch's own handler does: it is how a loader ends a worker that does not listen
