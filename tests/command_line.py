"""The command line: in this process, or in processes of its own, killed where they hang."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from torch_thor.cli import main

# seconds, for what never comes: starting takes a few, a busy machine makes them many
PATIENCE = 600


def call(monkeypatch, capsys, *words):
    """`torch-thor WORDS` in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["torch-thor", *(str(word) for word in words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    return stopped.value.code or 0, out, err


def assert_refused(result, *said, by="torch-thor"):
    """The command has ended with exit code 2 and one line of `by` that says all of `said`."""
    code, _, err = result
    assert code == 2, err
    assert err.startswith(f"{by}: ")
    assert err.count("\n") == 1
    for words in said:
        assert words in err


def contents(folder):
    """The bytes of every file below a folder, by path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(folder, *words, ranks=None, script=None):
    """`torch-thor WORDS` (or a `script`) in a folder, or as many as `ranks` under `torchrun`.

    The processes are forked (warm.py) where the system can.
    """
    command = ["-m", "torch_thor"] if script is None else [script]
    command = [str(word) for word in (*command, *words)]
    # threads as in this process: sums depend on their number
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "COLUMNS": "500"}
    if warm.AVAILABLE:
        if ranks is not None:
            return warm.WarmRanks(command, folder, environment, ranks)
        return warm.WarmProcess(command, folder, environment)
    if ranks is not None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, *command]
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background job ignores Ctrl-C, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process, timeout=PATIENCE):
    """(exit code, stdout, stderr); a process that hangs is killed with all that it has started."""
    family = [process.pid, *descendants(process.pid)]
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in {*family, *descendants(process.pid)}:
            end(pid)
        out, err = process.communicate()
        raise AssertionError(f"hung for {timeout} s and was killed\n{out}\n{err}") from None
    return process.returncode, out, err


def command(folder, *words, timeout=PATIENCE, **options):
    """Run to the end: (exit code, stdout, stderr)."""
    return finish(start(folder, *words, **options), timeout)


def end(pid):
    """Kill one process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid):
    """Ids of the processes that a process has started, and theirs (needs /proc)."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(deeper for child in children for deeper in descendants(child))]


def checkpoints(run, optimizer):
    """Steps of the checkpoints of one optimizer, sorted."""
    return sorted(int(path.name[5:]) for path in (run / optimizer / "checkpoints").glob("step-*"))


def lines(run, optimizer, kind=None, *, timed=False):
    """The lines of `metrics.jsonl`, without their times."""
    clock = () if timed else ("seconds", "duration", "waited")
    text = (run / optimizer / "metrics.jsonl").read_text()
    every = [json.loads(line) for line in text.splitlines()]
    every = [line for line in every if kind in (None, line["kind"])]
    return [{key: value for key, value in line.items() if key not in clock} for line in every]
