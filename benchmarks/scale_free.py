"""Scale-free THOR against tuned SGD, AdamW, Muon and SOAP on three unlike tasks: steps to what tuned SGD ends with.

    python benchmarks/scale_free.py                # what is missing under results/scale_free, then table and pictures
    python benchmarks/scale_free.py --table        # table and pictures alone, from the raw data

Protocol. The tasks stand in tasks.py, the optimizers and their grids in contenders.py: six learning rates a factor of
two apart for each optimizer (and each task, where their scales differ), tried with one seed that is used for nothing
else; then a second momentum, at the best of them and at twice that. The best by the task's final figure runs with three
other seeds. THOR alone has ONE setting for all tasks: the one with the smallest mean, over the tasks, of its final
figure's rank among its six learning rates, in runs of half of the steps with half of the schedule, since half of SGD's
steps is the aim; it then runs with both lengths. On the classifier the peers run for half of the steps too, each tuned
for that over two learning rates and two momenta. The target of a seed is SGD's final figure, at full length, in that
seed; steps to target are interpolated between the two evaluations around it, and given as a share of SGD's steps.
More seeds, on the classifier, for SGD at full length and for Muon and THOR at half.

The seconds in the raw data depend on what else the machine did: step times are taken by scale_free_time.py.
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from contenders import (
    HEAT_LRS,
    LOW_MOMENTUM,
    PEERS,
    THOR_DAMPING,
    THOR_DAMPINGS,
    THOR_LRS,
    THOR_MOMENTUM,
    grid,
    make,
)
from tasks import TASKS, text_checksum, train

RESULTS = Path(__file__).parent / "results" / "scale_free"
TUNING_SEED = 10
SEEDS = (0, 1, 2)
HALF = 0.5
HALF_TASKS = ("classifier",)  # where the peers run for half of the steps too
# There the margins are narrower than what rounding alone makes of a run: more seeds for those that it is between.
MORE_SEEDS = (3, 4, 5, 6, 7, 8, 9, 20)
MORE_HALVES = ("muon", "thor")


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        task: key of ``TASKS``.
        optimizer: one of ``PEERS``, or ``"thor"``.
        lr: learning rate.
        seed: seed.
        damping: of THOR; None for the others.
        share: length of run and schedule as a share of the task's.
        momentum: None for the peer's usual one.
    """

    task: str
    optimizer: str
    lr: float
    seed: int
    damping: float | None = None
    share: float = 1.0
    momentum: float | None = None

    @property
    def file(self) -> Path:
        """Where its raw data stands."""
        damping = "" if self.damping is None else f"-damping{self.damping:g}"
        momentum = "" if self.momentum is None else f"-momentum{self.momentum:g}"
        share = "" if self.share == 1 else f"-share{self.share:g}"
        return RESULTS / f"{self.task}-{self.optimizer}-lr{self.lr:g}{momentum}{damping}{share}-seed{self.seed}.json"

    def result(self) -> dict[str, Any]:
        """Return the raw data."""
        result: dict[str, Any] = json.loads(self.file.read_text())
        return result

    def final(self) -> float:
        """Return the figure at the last step; the worst there is for a run that did not get there."""
        run, higher = self.result(), TASKS[self.task].higher
        if run["failure"]:
            return -float("inf") if higher else float("inf")
        return float(run["evaluations"][-1][1])


def run_one(job: Job) -> None:
    """Train once, on one thread, and write the raw data.

    Args:
        job: what to run.
    """
    import torch

    from machine import describe

    torch.set_num_threads(1)
    task, started = TASKS[job.task], time.perf_counter()
    outcome = train(
        task, job.seed, lambda model: make(job.optimizer, model, job.lr, job.damping, job.momentum), job.share
    )
    result = {
        **{key: getattr(job, key) for key in ("task", "optimizer", "lr", "damping", "momentum", "seed", "share")},
        **outcome,
        "seconds": round(time.perf_counter() - started, 1),
        "text": text_checksum() if job.task == "language" else None,
        "machine": describe(threads=1),
    }
    job.file.parent.mkdir(parents=True, exist_ok=True)
    temporary = job.file.with_suffix(".tmp")
    temporary.write_text(json.dumps(result) + "\n")
    temporary.rename(job.file)


def complete(jobs: list[Job], workers: int) -> None:
    """Run the jobs whose raw data is missing.

    Args:
        jobs: what to run.
        workers: processes at a time, one thread each.
    """
    missing = [job for job in dict.fromkeys(jobs) if not job.file.exists()]
    if not missing:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for job, _ in zip(missing, pool.map(run_one, missing), strict=True):
            print(f"{job.file.stem}: {job.final():.4f}", flush=True)


def best(jobs: list[Job]) -> Job:
    """Return the job with the best final figure.

    Args:
        jobs: of one task.

    Returns:
        One of them.
    """
    sign = 1 if TASKS[jobs[0].task].higher else -1
    return max(jobs, key=lambda job: sign * job.final())


def thor(task: str, lr: float, seed: int, share: float, damping: float = THOR_DAMPING) -> Job:
    """Return a run of THOR.

    Args:
        task: key of ``TASKS``.
        lr: learning rate.
        seed: seed.
        share: length as a share of the task's.
        damping: damping.

    Returns:
        A job.
    """
    return Job(task, "thor", lr, seed, damping, share, THOR_MOMENTUM)


def tuning(task: str, optimizer: str) -> list[Job]:
    """Return the tuning runs over the learning rate.

    Args:
        task: key of ``TASKS``.
        optimizer: one of ``PEERS``, or ``"thor"``.

    Returns:
        One job a learning rate: of a peer at full length and its usual momentum, of THOR at half.
    """
    if optimizer == "thor":
        return [thor(task, lr, TUNING_SEED, HALF) for lr in THOR_LRS]
    return [Job(task, optimizer, lr, TUNING_SEED) for lr in grid(optimizer, task)]


def lower_momentum(task: str, peer: str) -> list[Job]:
    """Return the tuning runs of a peer with the second momentum; those over the learning rate come first.

    Args:
        task: key of ``TASKS``.
        peer: one of ``PEERS``.

    Returns:
        One job a learning rate.
    """
    first = best(tuning(task, peer))
    return [replace(first, lr=lr, momentum=LOW_MOMENTUM) for lr in (first.lr, 2 * first.lr)]


def half_tuning(task: str, peer: str) -> list[Job]:
    """Return the tuning runs of a peer that trains for half of the steps; those of full length come first.

    Args:
        task: key of ``TASKS``.
        peer: one of ``PEERS``.

    Returns:
        A job a learning rate and momentum.
    """
    second = lower_momentum(task, peer)
    return [replace(job, momentum=m, share=HALF) for job in second for m in (None, LOW_MOMENTUM)]


def thor_lr() -> float:
    """Return the learning rate of the one setting: the smallest mean rank, over the tasks, of its final figure.

    Returns:
        One of ``THOR_LRS``.
    """
    ranks = dict.fromkeys(THOR_LRS, 0)
    for task in TASKS:
        sign = -1 if TASKS[task].higher else 1
        for rank, job in enumerate(sorted(tuning(task, "thor"), key=lambda job: sign * job.final())):
            ranks[job.lr] += rank
    return min(ranks, key=lambda lr: ranks[lr])


def confirmation(task: str, optimizer: str, seed: int) -> Job:
    """Return the run of an optimizer's chosen setting, at full length.

    Args:
        task: key of ``TASKS``.
        optimizer: one of ``PEERS``, or ``"thor"``.
        seed: seed.

    Returns:
        A job.
    """
    if optimizer == "thor":
        return thor(task, thor_lr(), seed, 1.0)
    return replace(best(tuning(task, optimizer) + lower_momentum(task, optimizer)), seed=seed)


def halved(task: str, optimizer: str, seed: int) -> Job:
    """Return the run of half the length, with a schedule of half the length.

    Args:
        task: key of ``TASKS``; of ``HALF_TASKS`` for a peer.
        optimizer: one of ``PEERS``, or ``"thor"``.
        seed: seed.

    Returns:
        A job.
    """
    if optimizer == "thor":
        return thor(task, thor_lr(), seed, HALF)
    return replace(best(half_tuning(task, optimizer)), seed=seed)


def further(task: str, seed: int) -> list[Job]:
    """Return the runs of one of the further seeds.

    Args:
        task: one of ``HALF_TASKS``.
        seed: one of ``MORE_SEEDS``.

    Returns:
        SGD at full length, then ``MORE_HALVES`` at half.
    """
    return [confirmation(task, "sgd", seed), *(halved(task, name, seed) for name in MORE_HALVES)]


def heat_map(task: str) -> list[list[Job]]:
    """Return THOR's runs over learning rate and damping, in the tuning seed, of half the length.

    Args:
        task: key of ``TASKS``.

    Returns:
        A row a damping.
    """
    return [[thor(task, lr, TUNING_SEED, HALF, damping) for lr in sorted(HEAT_LRS)] for damping in THOR_DAMPINGS]


def main() -> None:
    """Run what is missing, print the table and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="table and pictures alone, from the raw data")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time, one thread each")
    options = parser.parse_args()
    if not options.table:
        names = [*PEERS, "thor"]
        complete([job for name in names for task in TASKS for job in tuning(task, name)], options.workers)
        complete([job for name in PEERS for task in TASKS for job in lower_momentum(task, name)], options.workers)
        complete([job for name in PEERS for task in HALF_TASKS for job in half_tuning(task, name)], options.workers)
        halves = [(task, name) for task in TASKS for name in names if name == "thor" or task in HALF_TASKS]
        complete([halved(task, name, seed) for seed in SEEDS for task, name in halves], options.workers)
        chosen = [confirmation(task, name, seed) for seed in SEEDS for task in TASKS for name in names]
        complete(chosen, options.workers)
        complete([job for seed in MORE_SEEDS for task in HALF_TASKS for job in further(task, seed)], options.workers)
        cells = [job for task in TASKS for row in heat_map(task) for job in row]
        complete(sorted(cells, key=lambda job: HEAT_LRS.index(job.lr)), options.workers)
    from scale_free_report import draw, table

    print(table())
    draw()


if __name__ == "__main__":
    main()
