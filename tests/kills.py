"""Kill trainings at random moments, continue them, and compare: `python tests/kills.py [SEED]`, for
ten minutes.

`train digits` is killed 40 times and `train bert-tiny` 10 times, with the signal that nothing can
handle. A run that reaches its end must equal a run that was never killed, bit for bit except for
its times; then the next run begins.
"""

import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "src"))

from command_line import checkpoints, command, end, finish, lines, start
from tiny import assert_same

WORDS = ("device=cpu", "threads=1", "ema_decay=0.9", "keep_checkpoints=3", "data.workers.count=1")
RUNS = {
    "digits": (40, ("epochs=4", "checkpoint_interval=5", "eval_interval=7")),
    "bert-tiny": (10, ("epochs=2", "checkpoint_interval=3", "eval_interval=8", "data.root=texts")),
}


def content(run):
    """All that a finished run has written, but for times."""
    found = {}
    for folder in sorted(path.parent for path in run.glob("*/metrics.jsonl")):
        assert checkpoints(run, folder.name)
        found[folder.name] = lines(run, folder.name)
        for path in sorted(folder.rglob("step-*")):
            state = torch.load(path / "state.pt", weights_only=True)
            for part in (state, state["score"], state["best"]):
                if part is not None:
                    del part["seconds"]
            weights = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
            found[str(path.relative_to(run))] = [state, weights, (path / "recipe.yaml").read_text()]
    return found


def kill(place, recipe, times, words):
    """Kill a training so many times: (runs that reached their end, the steps continued from)."""
    train = ("train", recipe, *WORDS, *words, "--out")
    for name in ("first", "whole"):  # the first run may prepare its data
        began = time.monotonic()
        code, out, err = command(place, *train, name)
        assert code == 0, out + err
    duration, whole = time.monotonic() - began, content(place / "whole")
    kills, ends, steps, run = 0, 0, [], place / "run"
    while kills < times or run.exists():
        resumed = ["--resume"] if (run / "recipe.yaml").exists() else []
        process = start(place, *train, "run", *resumed)
        if kills < times:
            time.sleep(random.uniform(0, duration))
            end(process.pid)
        code, out, err = finish(process)
        told = [line for line in out.splitlines() if ": continues from" in line]
        steps += [int(line.split("step ")[1].split()[0]) for line in told]
        assert "damaged" not in out + err, out + err
        if code == -signal.SIGKILL:
            kills += 1
        else:
            assert code == 0, out + err
            assert_same(content(run), whole)
            assert not list(run.rglob(".writing-*"))
            shutil.rmtree(run)
            ends += 1
    return ends, steps


def main(seed):
    random.seed(int(seed))
    for recipe, (times, words) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            ends, steps = kill(Path(folder), recipe, times, words)
        print(
            f"{recipe}: killed {times} times, {ends} runs reached their end and equal a run "
            f"that was never killed; continued from steps {steps}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:] or "0")
