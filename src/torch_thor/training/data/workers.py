"""The worker processes that make batches: their signals, their end with the training, and the error if one dies."""

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

GRACE = 5.0  # seconds to wait for the end of a process that is being killed
PAUSE = 1.0  # seconds between a worker's checks whether its training process is alive
MORE_SHARED_MEMORY = (
    "enlarge /dev/shm (docker run --shm-size=8g), or use a smaller data.workers.count, data.workers.prefetch or "
    "batch_size"
)
_REMEDIES = {
    "SIGBUS": f"shared memory was most likely full: {MORE_SHARED_MEMORY}",
    "SIGKILL": "memory was most likely full: use a smaller data.workers.count or data.workers.prefetch",
}


def check_workers(workers: Workers, processes: int, say: Callable[[str], None]) -> None:
    """Warn if there are more workers than CPU cores.

    Args:
        workers: The workers of each training process.
        processes: Training processes on this machine.
        say: Prints a line; it is called for the warning.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = workers.count * processes
    if total > cores:
        each = f"data.workers.count={workers.count}" + (f" on each of {processes} processes" if processes > 1 else "")
        enough = f"data.workers.count={cores // processes} would be enough"
        say(f"{each}: {total} worker processes share {cores} cores; {enough}")


class DeathWatch:
    """Raises a one-line error if a worker has died, but only while the training waits for its batches.

    torch's handler of SIGCHLD raises at any point, such as in the middle of a step or of another error message, and
    again for each further worker that dies. Without this handler, a waiting loader checks its workers every 5 seconds.
    """

    def __init__(self) -> None:
        self.workers: list[BaseProcess] = []

    def start(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin an iteration and remove torch's signal handler. The first iteration starts the workers.

        Args:
            loader: A loader with persistent workers, or without workers.

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
        except OSError as error:  # no memory, process or semaphore left
            count, reason = loader.num_workers, error.strerror or error
            raise UserError(
                f"data.workers.count={count}: the worker processes cannot be started ({reason}): use fewer, or 0 to "
                "read the images in the training process"
            ) from error
        finally:
            if (
                handler is not None and threading.current_thread() is threading.main_thread()
            ):  # in other threads torch sets none
                signal.signal(signal.SIGCHLD, handler)
        self.workers = list(getattr(batches, "_workers", ()))  # torch has no public attribute for them
        return batches

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Replace an exception of the block by an error about a dead worker, if one has died.

        Yields:
            Nothing.

        Raises:
            UserError: If a worker has died.
            RuntimeError: As the block raises it, if all workers are alive.
            OSError: As the block raises it, if all workers are alive.
            EOFError: As the block raises it, if all workers are alive.
        """
        self._check()
        try:
            yield
        except (RuntimeError, OSError, EOFError):
            if self.workers:  # an ending process closes its connections first, then its sentinel
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
            raise UserError(f"a worker process has died ({how}): {remedy}; continue with --resume")


def _try_semaphores(count: int) -> None:
    # As many as the workers' queues will need. If torch's iterator failed halfway, it would print a traceback.
    _ = [multiprocessing.Lock() for _ in range(4 * (count + 2))]


def start_worker(_: int) -> None:
    """Prepare a worker process: it ignores signals that are meant for the training, and ends with the training process.

    The training process decides what happens after a signal, and it needs its workers until it has written a
    checkpoint. Ctrl-C, however, reaches every process of a terminal, and `torchrun`, `timeout` and cluster schedulers
    send SIGTERM to all processes of a job.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # sigtimedwait gives the sender of a signal; macOS does not have it and relies on torch's own check of the parent
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_training, args=(os.getppid(),), daemon=True).start()


def _end_with_training(started_by: int) -> None:
    # In a thread, because torch's own check does not run while an image is read, and a disk may block a worker forever.
    # With the start method "forkserver", `started_by` is the server, which ends with the training process.
    training = multiprocessing.parent_process()
    while training is not None and training.is_alive() and os.getppid() == started_by:
        received = signal.sigtimedwait({signal.SIGTERM}, PAUSE)
        if received is not None and received.si_pid == training.pid:
            break
    os._exit(0)  # as in torch's own handler: a loader ends an unresponsive worker with SIGTERM
