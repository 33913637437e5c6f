"""ThorMuon with one setting against other optimizers that are tuned for each problem.

The others are SGD, AdamW, Muon, SOAP, PSGD-Kron and schedule-free AdamW.

    python -m benchmarks suite           # runs what is missing, then tables and a picture
    python -m benchmarks suite --table

Problems, tuning, schedule and what is reported are described in docs/measurements/suite.md. Tuning
uses a seed that serves nothing else and half 0 of the held-out data, the report three other seeds
and half 1. A setting with the learning rate that serves all problems best on the whole, chosen with
the tuning seed, runs too. The time of a step is measured apart, by the optimizers with their chosen
settings in turns (jobs named `alone`). Raw data say `task` for a problem.
"""

import math
import statistics
from collections.abc import Iterator

from benchmarks.optimizers import CONTENDERS, FEWEST_RATES, PEERS, own_setting
from benchmarks.runner.stores import key_of
from benchmarks.suite_problems import PROBLEMS
from benchmarks.suite_report import NAMES, README, Contest, contests, picture, tables
from benchmarks.training import SEEDS, TUNING_SEEDS, Job, Rows, confirm, optimizers, run, tolerance

__all__ = ["draw", "headlines", "jobs", "optimizers", "run", "table", "tolerance"]

TUNING_SEED, MORE_SEEDS = TUNING_SEEDS[0], tuple(range(3, 10))
MOST_RATES = 10
# what is given one learning rate for all problems; the other peers have their usual momentum
SAME: dict[str, Job] = {NAMES[name]: {"optimizer": name} for name in PEERS}
SAME["Muon, momentum 0.8"] = {"optimizer": "muon", "momentum": 0.8}
THOR_PROBLEMS = ("resnet128", "resnet1024", "autoencoder")  # those that THOR is meant to serve


# ---- what is run ---------------------------------------------------------------------------------


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known: which come next depends on what was best so far."""
    found, best_ones = [], chosen(rows)
    for problem in PROBLEMS:
        ours = {"task": problem, **own_setting(problem)}
        best = {name: setting for (its, name), setting in best_ones.items() if its == problem}
        own = [job for name in contenders(problem) for job in tuning(rows, problem, name)]
        own += [job for setting in (*best.values(), ours) for job in confirm(setting)]
        found += own
        if all(key_of(job) in rows for job in own):
            settings = {name: best[name] for name in PEERS} | {"thor-muon": ours}
            if problem in THOR_PROBLEMS:
                settings["thor"] = best["thor"]
            contest = Contest(problem, rows, best, {})
            if not contest.times:  # which do not depend on learning rate and momentum
                found.append({"task": problem, "settings": settings, "alone": True})
            rival = best[contest.rival]
            if contest.values(ours) and is_close(contest, rival):
                found += confirm(rival, MORE_SEEDS) + confirm(ours, MORE_SEEDS)
    if all(key_of(job) in rows for job in found):
        for peer in SAME.values():
            rates = candidates(rows, peer)
            found += [job for task in PROBLEMS for job in at_rates(task, peer, rates)]
        for setting in same_settings(rows).values():
            found += [job for task in PROBLEMS for job in confirm({"task": task, **setting})]
    return found


def is_close(contest: Contest, rival: Job) -> bool:
    """Return whether three seeds' figures differ by less than two standard errors of that."""
    ours = own_setting(contest.problem)
    own, other = (contest.values(setting)[: len(SEEDS)] for setting in (ours, rival))
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (own, other)))
    return abs(statistics.fmean(own) - statistics.fmean(other)) < 2 * error


def chosen(rows: Rows) -> dict[tuple[str, str], Job]:
    """Return the best setting of each optimizer that has been tuned on a problem."""
    found = {}
    for problem in PROBLEMS:
        for name in contenders(problem):
            tried = list(tuning(rows, problem, name))
            if all(key_of(job) in rows for job in tried):
                found[problem, name] = best(rows, tried)
    return found


def table(rows: Rows) -> str:
    """Return the tables of the problems that are complete."""
    return tables(contests(rows, chosen(rows), same_settings(rows)))


def draw(rows: Rows) -> None:
    """Draw the picture of four problems."""
    picture(contests(rows, chosen(rows), same_settings(rows)))


def contenders(problem: str) -> list[str]:
    """List the optimizers that are tuned on a problem."""
    return [*PEERS, "thor-muon", *(["thor", "thor-paper"] if problem in THOR_PROBLEMS else [])]


def tuning(rows: Rows, problem: str, name: str) -> Iterator[Job]:
    """Yield the tuning runs of an optimizer, up to those without which the next are not known."""
    own: list[Job] = []
    lr = CONTENDERS[name].lr
    rates = [lr / 2, lr, 2 * lr]
    while True:
        new = [
            {"task": problem, "optimizer": name, "lr": float(f"{rate:.4g}"), "seed": TUNING_SEED}
            for rate in rates
        ]
        yield from new
        own = sorted([*own, *new], key=lambda job: job["lr"])
        if any(key_of(job) not in rows for job in new):
            return
        at = own.index(best_job(rows, own))
        if len(own) >= (FEWEST_RATES if 0 < at < len(own) - 1 else MOST_RATES):
            break
        # beyond the end that the best rate is nearer to
        rates = [own[0]["lr"] / 2] if at < len(own) / 2 else [2 * own[-1]["lr"]]
    found = best_job(rows, own)
    new = []
    for other in CONTENDERS[name].others:
        more = {key: value for key, value in other.items() if key != "factor"}
        new.append({**found, "lr": float(f"{found['lr'] * other.get('factor', 1):.4g}"), **more})
    while new:
        yield from new
        own += new
        if any(key_of(job) not in rows for job in new):
            return
        top = best_job(rows, own)
        beside = [{**top, "lr": float(f"{top['lr'] * factor:.4g}")} for factor in (0.5, 2.0)]
        new = [job for job in beside if "momentum" in top and job not in own]


def best_job(rows: Rows, tried: list[Job]) -> Job:
    """Return the run with the best figure."""
    sign = 1 if PROBLEMS[tried[0]["task"]].higher else -1

    def score(job: Job) -> float:
        value = rows[key_of(job)]["value"]
        return -math.inf if value is None or math.isnan(value) else sign * value

    return max(tried, key=score)


def best(rows: Rows, tried: list[Job]) -> Job:
    """Return the setting of the best run."""
    return {key: value for key, value in best_job(rows, tried).items() if key != "seed"}


# ---- one setting for all problems ----------------------------------------------------------------


def candidates(rows: Rows, own: Job) -> list[float]:
    """Return learning rates around the first guess, more as long as the best is at an end."""
    rates = [
        float(f"{CONTENDERS[own['optimizer']].lr * factor:.4g}") for factor in (0.25, 0.5, 1, 2)
    ]
    while (best := same_rate(rows, own, rates)) in (rates[0], rates[-1]):
        rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, 2 * rates[-1]]
    return rates


def at_rates(problem: str, own: Job, rates: list[float]) -> list[Job]:
    """Return the tuning runs of an optimizer at some learning rates."""
    return [{"task": problem, **own, "lr": lr, "seed": TUNING_SEED} for lr in rates]


def same_settings(rows: Rows) -> dict[str, Job]:
    """Return each peer's setting for all problems, by its title; nothing while runs are missing."""
    rates = {title: same_rate(rows, own, candidates(rows, own)) for title, own in SAME.items()}
    if None in rates.values():
        return {}
    return {title: {**own, "lr": rates[title]} for title, own in SAME.items()}


def same_rate(rows: Rows, own: Job, rates: list[float]) -> float | None:
    """Return the learning rate that has the smallest mean logarithm of errors over problems.

    The error is the loss, or 1 - accuracy, and at most ten times the smallest of the optimizer on
    the problem. The result is None where runs are missing.
    """
    total = dict.fromkeys(rates, 0.0)
    for problem, about in PROBLEMS.items():
        errors = {}
        for job in at_rates(problem, own, rates):
            if key_of(job) not in rows:
                return None
            value = rows[key_of(job)]["value"]
            if value is not None and about.higher:
                value = 1 - value
            errors[job["lr"]] = math.inf if value is None else value
        for lr, error in errors.items():
            total[lr] += math.log(min(10.0, error / min(errors.values())))
    return min(total, key=lambda lr: total[lr])


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of ThorMuon on each problem whose row README shows."""
    return [{"task": problem, **own_setting(problem), "seed": 0} for problem in README]
