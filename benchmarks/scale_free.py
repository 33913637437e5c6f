"""ThorMuon with one setting against tuned SGD, AdamW, Muon and SOAP on several tasks, batch sizes and lengths.

    python benchmarks/scale_free.py                # runs what is missing in results/scale_free, then tables, pictures
    python benchmarks/scale_free.py --table        # writes tables and pictures from the raw data only

Protocol. The tasks are defined in tasks.py, the optimizers and their grids in contenders.py. A contest is a task at
its own length or at twice that length. Every optimizer except THOR is tuned on each task with a seed that is used for
nothing else. First six learning rates, a factor of two apart, are tried. Then a second momentum is tried with the best
learning rate and with twice that. For Muon, two other learning rates of its AdamW part are tried as well. At twice the
length Muon and SOAP are tuned again: both momenta, with half, one and two times the learning rate that was best. The
setting with the best final value is run with three other seeds (ten in the closest contests).

THOR has its defaults everywhere, with a weight decay of 0.01. Five learning rates of THOR are shown with the tuning
seed. THOR without curvature (with damping so large that the inverse of A is a multiple of the identity) is tried at
three learning rates, and the best of them is run with the other seeds as well.

The number of steps to a target (the final value of SGD or of Muon with the same seed) is interpolated between two
evaluations. Seconds in the raw data depend on the load of the machine; scale_free_time.py measures the time per step.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from contenders import (
    ADAMW_SHARES,
    NO_CURVATURE,
    PEERS,
    SECOND_MOMENTUM,
    THOR_LRS,
    USUAL_MOMENTUM,
    Setting,
    grid,
)
from tasks import TASKS, text_checksum, train
from torch_thor.bench import Folder, describe, missing, script

STORE = Folder(Path(__file__).parent / "results" / "scale_free")
TUNING_SEED = 10
SEEDS = (0, 1, 2)
# Where the margins are narrower than what seeds differ by: more of them, for those that it is between.
MORE_SEEDS = (3, 4, 5, 6, 7, 8, 9)
NARROW = ("classifier", "classifier512")
THOR_LR = 0.08  # the default of ThorMuon
PLAIN = "thor, no curvature"


@dataclass(frozen=True)
class Contest:
    """A task and a length.

    Args:
        task: key of ``TASKS``.
        length: of the run and its schedule, as a share of the task's.
    """

    task: str
    length: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Who takes part."""
        if self.length != 1:
            return ("muon", "soap", "thor", PLAIN)
        peers = PEERS if self.task in ("classifier", "autoencoder", "language") else ("sgd", "muon", "soap")
        return (*peers, "thor", PLAIN)

    def __str__(self) -> str:
        return self.task if self.length == 1 else f"{self.task}, {self.length:g} x"

    def seeds(self, name: str) -> tuple[int, ...]:
        """Return the seeds that an optimizer's chosen setting runs with.

        Args:
            name: one of ``names``.

        Returns:
            Three, or ten.
        """
        narrow = self.task in NARROW and self.length == 1 and name in ("muon", "thor", PLAIN)
        return SEEDS + MORE_SEEDS if narrow else SEEDS


CONTESTS = [Contest(task) for task in TASKS] + [Contest(t, 2.0) for t in ("classifier", "autoencoder", "language")]


@dataclass(frozen=True)
class Training:
    """One run.

    Args:
        contest: the task and its length.
        setting: the optimizer.
        seed: seed.
    """

    contest: Contest
    setting: Setting
    seed: int

    @property
    def key(self) -> str:
        """Name of its raw data."""
        length = "" if self.contest.length == 1 else f"-length{self.contest.length:g}"
        return f"{self.contest.task}-{self.setting}{length}-seed{self.seed}"

    def run(self) -> dict[str, Any]:
        """Train.

        Returns:
            The raw data.
        """
        started = time.perf_counter()
        outcome = train(TASKS[self.contest.task], self.seed, self.setting.make, self.contest.length)
        return {
            **asdict(self.contest),
            **asdict(self.setting),
            "seed": self.seed,
            **outcome,
            "seconds": round(time.perf_counter() - started, 1),
            "text": text_checksum() if self.contest.task == "language" else None,
            "machine": describe(),
        }

    def result(self) -> dict[str, Any]:
        """Return the raw data."""
        return STORE.read(self.key)

    def final(self) -> float:
        """Return the figure at the last step; the worst there is for a run that did not get there."""
        run, higher = self.result(), TASKS[self.contest.task].higher
        if run["failure"]:
            return -float("inf") if higher else float("inf")
        return float(run["evaluations"][-1][1])


def best(jobs: list[Training]) -> Training:
    """Return the job with the best final figure.

    Args:
        jobs: of one contest.

    Returns:
        One of them.
    """
    sign = 1 if TASKS[jobs[0].contest.task].higher else -1
    return max(jobs, key=lambda job: sign * job.final())


def tuning(contest: Contest, name: str) -> list[Training]:
    """Return the tuning runs that are known: what a round is depends on the results of those before it.

    Args:
        contest: the contest.
        name: one of ``contest.names``.

    Returns:
        The runs of all rounds once those of the first ones are there.
    """
    if name in ("thor", PLAIN):
        lrs, damping = (THOR_LRS, None) if name == "thor" else (THOR_LRS[1:4], NO_CURVATURE)
        return [Training(contest, Setting("thor", lr, damping=damping), TUNING_SEED) for lr in lrs]
    if contest.length != 1:
        found = chosen(replace(contest, length=1.0), name)
        momenta = (USUAL_MOMENTUM[name], SECOND_MOMENTUM)
        lrs = [found.lr * factor for factor in (0.5, 1.0, 2.0)]
        return [Training(contest, replace(found, lr=lr, momentum=m), TUNING_SEED) for m in momenta for lr in lrs]
    jobs = [Training(contest, Setting(name, lr), TUNING_SEED) for lr in grid(name, contest.task)]
    if missing(jobs, STORE):
        return jobs
    first = best(jobs).setting
    jobs += [
        Training(contest, replace(first, lr=lr, momentum=SECOND_MOMENTUM), TUNING_SEED)
        for lr in (first.lr, 2 * first.lr)
    ]
    if name == "muon" and not missing(jobs, STORE):
        second = best(jobs).setting
        jobs += [Training(contest, replace(second, adamw_share=share), TUNING_SEED) for share in ADAMW_SHARES]
    return jobs


def chosen(contest: Contest, name: str) -> Setting:
    """Return the setting that runs with the other seeds.

    Args:
        contest: the contest.
        name: one of ``contest.names``.

    Returns:
        THOR's defaults, or what was best in the tuning seed.
    """
    if name == "thor":
        return Setting("thor", THOR_LR)
    return best(tuning(contest, name)).setting


def confirmation(contest: Contest, name: str, seed: int) -> Training:
    """Return the run of an optimizer's chosen setting.

    Args:
        contest: the contest.
        name: one of ``contest.names``.
        seed: seed.

    Returns:
        A job.
    """
    return Training(contest, chosen(contest, name), seed)


def main() -> None:
    """Run what is missing, print the tables and draw."""
    options = script.parser(__doc__).parse_args()
    if not options.table:
        for contests in (CONTESTS[: len(TASKS)], CONTESTS[len(TASKS) :]):
            pairs = [(contest, name) for contest in contests for name in contest.names]

            def one_round(pairs: list[tuple[Contest, str]] = pairs) -> list[Training]:
                return [job for contest, name in pairs for job in tuning(contest, name)]

            def confirmed(pairs: list[tuple[Contest, str]] = pairs) -> list[Training]:
                return [confirmation(c, name, seed) for c, name in pairs for seed in c.seeds(name)]

            script.measure(STORE, [one_round, one_round, one_round, confirmed], options.workers)
    from scale_free_report import draw, tables

    print(tables())
    draw()


if __name__ == "__main__":
    main()
