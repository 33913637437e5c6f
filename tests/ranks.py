"""Processes for tests of several ranks: started once, then given one function after the other.

Every function runs in a process group of its own (gloo). A rank that raises is reported with its
traceback. Where a rank hangs or dies all are killed, and the next function gets new processes.
"""

import contextlib
import datetime
import time
import traceback
from multiprocessing.connection import wait

import torch
from torch import distributed as dist

import warm

# Limits for what will never come: what waits for something goes on at once when it is there.
START_SECONDS = 600  # importing torch, beside other tests; and ending
SECONDS = 600  # for one function; a collective that waits in vain gives up earlier
COLLECTIVE_SECONDS = 300


def _serve(rank, connection):
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        connection.send("ready")
        while (task := connection.recv()) is not None:
            function, world, store, args = task
            try:
                torch.manual_seed(0)
                timeout = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
                given = {"rank": rank, "world_size": world, "timeout": timeout}
                dist.init_process_group("gloo", init_method=f"file://{store}", **given)
                connection.send((None, function(rank, world, *args)))
            except BaseException:
                connection.send((traceback.format_exc(), None))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()


class Ranks:
    """A pool of processes: the most that a function may ask for."""

    def __init__(self, most=4):
        self.most = most
        self.processes, self.connections = [], []
        self.count = 0

    def start(self):
        context = warm.context()
        for rank in range(self.most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        for connection in self.connections:
            assert connection.poll(START_SECONDS), "a process did not start"
            assert connection.recv() == "ready"

    def run(self, world, folder, function, *args, seconds=SECONDS):
        """Return what `function(rank, world, *args)` returns on ranks 0 to world - 1."""
        if not self.processes:
            self.start()
        self.count += 1
        store = folder / f"store{self.count}"
        for connection in self.connections[:world]:
            connection.send((function, world, str(store), args))
        answers, deadline = {}, time.monotonic() + seconds
        waiting = dict(zip(self.connections[:world], range(world), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = waiting.pop(connection)
                with contextlib.suppress(EOFError):  # the process has died
                    answers[rank] = connection.recv()
            if not ready or len(answers) + len(waiting) < world:
                self.kill()
                lost = sorted({*range(world)} - answers.keys())
                raise ChildProcessError(f"of ranks {lost} of {function.__name__} some died or hung")
        errors = [f"rank {rank}: {error}" for rank, (error, _) in sorted(answers.items()) if error]
        if errors:
            raise AssertionError("\n".join(errors))
        return [answers[rank][1] for rank in range(world)]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections = [], []

    def close(self):
        """End the processes as they should end; raise if a process does not."""
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(START_SECONDS)
        codes = [process.exitcode for process in self.processes]  # None for a process that hangs
        self.kill()
        assert all(code == 0 for code in codes), f"exit codes {codes}"
