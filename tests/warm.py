"""Processes that start at once: forked from a process that has imported what the application needs.

A fresh interpreter imports for seven seconds. It is started where a system cannot fork.
"""

import atexit
import base64
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection, forkserver
from pathlib import Path

from matplotlib.figure import Figure
from torch import distributed as dist

# torch._dynamo is what the first optimizer imports, the others are what training and its reports
# need
PRELOADED = (
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.pytorch_utils",
    "torch.utils.tensorboard",
    "torch_thor.training.run",
    "torch_thor.cli",
    "torch_thor.commands",
    "torchvision.transforms.v2",
    "sklearn.datasets",
    "matplotlib.figure",
    "PIL.JpegImagePlugin",
    "pydantic.type_adapter",
)
AVAILABLE = sys.platform == "linux"  # elsewhere libraries do not bear a fork
BLANK = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP6DwABBQECz6AuzQAAAABJRU5ErkJggg=="
)  # a PNG of one pixel
GRACE = 300  # seconds that the other ranks have to end when a rank has failed


def context():
    """The start method of warm processes; the process that they are forked from has one thread."""
    if not AVAILABLE:
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MPLBACKEND")}
    os.environ.update(OMP_NUM_THREADS="1", MPLBACKEND="Agg")
    try:
        found.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return found


def save_blank(figure, path, **options):
    """In the place of `Figure.savefig`: to draw takes longer than a small training."""
    Path(path).write_bytes(BLANK)


def _become(folder, environment, words, streams):
    """In the new process: run `python WORDS` as a fresh interpreter would, its output in files."""
    os.setsid()
    for number, (name, path) in enumerate(zip(("stdout", "stderr"), streams, strict=True), 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
        stream = open(number, "w", closefd=False, **options)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    multiprocessing.current_process()._config["daemon"] = False  # it may have workers
    multiprocessing.set_start_method(None, force=True)  # the workers start as the system has it
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Figure.savefig = save_blank
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    is_module = words[0] == "-m"
    sys.argv = list(words[is_module:])
    sys.path.insert(0, str(folder if is_module else Path(words[0]).parent))
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without


class WarmProcess:
    """`python WORDS` in a folder, forked: the part of `subprocess.Popen` that tests use."""

    def __init__(self, words, folder, environment):
        self._place = tempfile.TemporaryDirectory()
        self._streams = [Path(self._place.name) / name for name in ("stdout", "stderr")]
        for path in self._streams:
            path.touch()
        arguments = (str(folder), environment, [str(word) for word in words], self._streams)
        # a daemon: if a test ends without it, so does the process
        self._process = context().Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def communicate(self, timeout=None):
        """(stdout, stderr), once the process has ended."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout)
        return tuple(path.read_text(errors="replace") for path in self._streams)


class WarmRanks:
    """`torchrun` for warm processes: the environment of its ranks; a rank that fails ends all."""

    def __init__(self, words, folder, environment, count):
        # at a port of its own
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            **environment,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "warm",
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
        }
        own = [dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(count)]
        self.ranks = [WarmProcess(words, folder, {**environment, **rank}) for rank in own]
        self.pid = self.ranks[0].pid

    @property
    def returncode(self):
        """The exit code of a rank that has failed, or 0."""
        return next((rank.returncode for rank in self.ranks if rank.returncode), 0)

    def communicate(self, timeout=None):
        """(stdout, stderr) of all ranks; ranks that hang are killed."""
        deadline = time.monotonic() + (timeout or GRACE)
        running = {rank._process.sentinel: rank for rank in self.ranks}
        while running:
            ended = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
            for sentinel in ended:
                if running.pop(sentinel).returncode:
                    deadline = min(deadline, time.monotonic() + GRACE)
            for rank in () if ended else running.values():
                os.kill(rank.pid, signal.SIGKILL)
        texts = zip(*(rank.communicate() for rank in self.ranks), strict=True)
        return tuple("".join(parts) for parts in texts)
