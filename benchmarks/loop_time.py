"""The step of `torch-thor train` beside the loop of README, written out, on digits.

The two take turns.

    python -m benchmarks loop_time

Both have the same network, optimizer and batches. A step of `train` counts without evaluations and
checkpoints.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from torch.nn import functional

from benchmarks.runner.machine import provenance
from benchmarks.runner.timing import median_ratio
from torch_thor.training.folder import RunFolder
from torch_thor.training.log import observers_of
from torch_thor.training.loop import Observer, Run, train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipes import load_recipe
from torch_thor.training.run import build
from torch_thor.training.tasks.opening import open_task

LIMIT = 1.05


class Turns(Observer):
    """Takes a step of the loop written out after each step of the training."""

    def __init__(self, run: Run) -> None:
        self.model, self.optimizer = run.model, run.optimizer
        self.batches = run.task.batches(Ranks(), 0)
        self.trained: list[float] = []
        self.written_out: list[float] = []
        self.since = time.perf_counter()

    def end_of_step(self, run: Run) -> None:
        """Note the time of the training's step, then take one."""
        started = time.perf_counter()
        self.trained.append(started - self.since)
        x, y = next(self.batches)
        loss = functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.since = time.perf_counter()
        self.written_out.append(self.since - started)


def main() -> None:
    """Print the ratio of the step times for each of the recipe's optimizers."""
    torch.set_num_threads(1)
    words = [
        "device=cpu",
        "threads=1",
        "epochs=16",
        "eval_interval=100000",
        "checkpoint_interval=null",
    ]
    for name in ("thor-muon", "thor", "sgd"):
        recipe = load_recipe("digits", [f"optimizer={name}", *words])
        task = open_task(recipe, torch.device("cpu"), print)
        run, other = (build(recipe, name, task, Ranks()) for _ in range(2))
        turns = Turns(other)
        with tempfile.TemporaryDirectory() as place, (Path(place) / "said").open("w") as said:
            own = observers_of(run, RunFolder(Path(place)), Console(file=said), 0)
            train(run, [*own, turns])
        trained, written = turns.trained[20:-1], turns.written_out[20:-1]  # the last evaluates
        print(
            f"{name}: {median_ratio(trained, written):.3f} (limit {LIMIT}), median of "
            f"{len(trained)} pairs; {1000 * statistics.median(trained):.2f} and "
            f"{1000 * statistics.median(written):.2f} ms"
        )
    print(provenance())


if __name__ == "__main__":
    main()
