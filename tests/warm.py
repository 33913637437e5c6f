"""Processes that start at once: forked from one that has imported what the application needs.

A fresh interpreter imports for seven seconds. It is started where a system cannot fork.
"""

import atexit
import base64
import contextlib
import io
import multiprocessing
import os
import runpy
import selectors
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
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
GRACE = 300  # seconds that the other ranks have to end when one has failed


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


def _become(folder, environment, words, out, err):
    """In the new process: run `python WORDS` as a fresh interpreter would."""
    os.setsid()
    for connection, number in ((out, 1), (err, 2)):
        os.dup2(connection.fileno(), number)
        connection.close()
    as_it_is = {"line_buffering": True, "errors": "backslashreplace"}
    for name, number, options in (("stdout", 1, {}), ("stderr", 2, as_it_is)):
        buffer = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        stream = io.TextIOWrapper(buffer, encoding="utf-8", **options)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    multiprocessing.current_process()._config["daemon"] = False  # it may have workers
    multiprocessing.set_start_method(None, force=True)  # theirs is the system's again
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
    """`python WORDS` in a folder, forked: what is used of `subprocess.Popen`."""

    def __init__(self, words, folder, environment):
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
        self._ours = [ours for ours, _ in pipes]
        theirs = [end for _, end in pipes]
        arguments = (str(folder), environment, [str(word) for word in words], *theirs)
        # a daemon: if a test ends without it, so does the process
        self._process = context().Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        for end in theirs:
            end.close()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """(stdout, stderr), once every process that holds them has ended."""
        found = read_all(self._ours, timeout)
        self._process.join(timeout)
        return tuple(content.decode(errors="replace") for content in found)


def read_all(connections, timeout=None, watch=lambda: None):
    """All that is written to pipes until they are closed; `watch` is called now and then."""
    deadline = None if timeout is None else time.monotonic() + timeout
    found = {connection: b"" for connection in connections}
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            if not connection.closed:
                selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            watch()
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a warm process", timeout)
            for key, _ in selector.select(0.1):
                if chunk := os.read(key.fd, 1 << 16):
                    found[key.fileobj] += chunk
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    return list(found.values())


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
        self._failed_at = None

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        """None while a rank runs; then the exit code of a rank that has failed, or 0."""
        codes = [rank.poll() for rank in self.ranks]
        failed = [code for code in codes if code]
        if failed and None in codes:
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() > self._failed_at + GRACE:
                self.send_signal(signal.SIGKILL)
        return None if None in codes else (failed or [0])[0]

    def send_signal(self, number):
        """To all ranks, as torchrun passes on what it is sent."""
        for rank in self.ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.send_signal(number)

    def communicate(self, timeout=None):
        """(stdout, stderr) of all ranks."""
        found = read_all([ours for rank in self.ranks for ours in rank._ours], timeout, self.poll)
        for rank in self.ranks:
            rank._process.join(timeout)
        texts = [content.decode(errors="replace") for content in found]
        return "".join(texts[0::2]), "".join(texts[1::2])
