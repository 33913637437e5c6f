"""ThorMuon with one setting against other optimizers that are tuned for each problem.

The others are SGD, AdamW, Muon, SOAP, PSGD-Kron and schedule-free AdamW.

    python -m benchmarks suite           # runs what is missing, then tables and pictures
    python -m benchmarks suite --table   # tables and pictures alone, from the raw data

The problems are those of suite_problems.py, the optimizers and what they are tuned over those of
suite_optimizers.py. The learning rate grows over the first 5 % of the steps, then falls linearly to
0 (schedule-free AdamW's stays, as it is meant). Tuning uses a seed that serves nothing else, and
one half of the held-out data: six learning rates a factor of two apart, chosen around the best so
far, more while the best is at an end; then another momentum with the best learning rate and with
twice that, and for Muon two learning rates of its AdamW. The best setting runs with three other
seeds, and the other half of the held-out data gives its figures. ThorMuon has its default setting
with a weight decay of 0.01 for all problems; it is also tuned, to see what that is worth. A job
with the entry ``half`` is judged by that half: where defaults are chosen with several seeds, by
half 0. Optimizers' names with `one:` have the learning rate that serves all problems best on the
whole, chosen with the tuning seed. Everything is trained on one thread. Raw data say `task` for a
problem.

The time of a step is measured apart, by the optimizers with their chosen settings in turns (jobs
named `alone`).
"""

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.runner.numbers import apart
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import state_bytes, take_turns
from benchmarks.suite_optimizers import CLASSES, CONTENDERS, FEWEST_RATES, ONE, PEERS, make
from benchmarks.suite_problems import PROBLEMS, Batch, Problem
from benchmarks.suite_report import README, Contest, contests, picture, tables

TUNING_SEED, SEEDS, MORE_SEEDS = 10, (0, 1, 2), tuple(range(3, 10))
WARM_UP = 0.05  # of the steps
EVALUATIONS = 16
MOST_RATES = 10
HIGHEST_LOSS = 1e5  # a run whose loss exceeds it, or is no number, has diverged
THOR_PROBLEMS = ("resnet128", "resnet1024", "autoencoder")  # those that THOR is meant to serve
SPAN = 10  # rounds

Job = dict[str, Any]
Rows = dict[str, dict[str, Any]]


# ---- one run -------------------------------------------------------------------------------------


def run(job: Job) -> dict[str, Any]:
    """Train once, or time the steps of a problem."""
    torch.set_num_threads(1)
    problem = PROBLEMS[job["task"]]
    return time_steps(problem, job) if job.get("alone") else train(problem, job)


def train(problem: Problem, job: Job) -> dict[str, Any]:
    """Train; a tuning run is evaluated at its end alone."""
    tuning = job["seed"] == TUNING_SEED
    torch.manual_seed(job["seed"])
    model = problem.model().train()
    optimizer = make(model, job)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: share_of_lr(step, problem.steps, job)
    )
    batches, losses, curve, seconds, refreshes = (
        problem.batches(problem.batch, job["seed"]),
        [],
        [],
        0.0,
        0,
    )
    for step in range(1, problem.steps + 1):
        batch = next(batches)
        started = time.perf_counter()
        loss = problem.loss(model, batch)
        loss.backward()
        problem.prepare(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        seconds += time.perf_counter() - started
        refreshes += bool(getattr(optimizer, "last_refresh", ()))
        if not math.isfinite(losses[-1]) or losses[-1] > HIGHEST_LOSS:
            return {"value": None, "failure": f"loss {losses[-1]} in step {step}"}
        if step == problem.steps or (
            not tuning and step % max(1, problem.steps // EVALUATIONS) == 0
        ):
            curve.append(
                (step, evaluate(problem, model, optimizer, job.get("half", int(not tuning))))
            )
    result = {
        "value": curve[-1][1],
        "loss": statistics.fmean(losses[-max(1, problem.steps // 20) :]),
    }
    own = {"curve": curve, "seconds": round(seconds, 2), "refreshes": refreshes}
    return result | ({} if tuning else own)


def share_of_lr(step: int, steps: int, job: Job) -> float:
    """Return the learning rate of a step, from 0, as a share of the highest."""
    grown = (step + 1) / max(1.0, WARM_UP * steps)
    return min(
        1.0,
        grown,
        1.0 if job["optimizer"] == "schedule-free" else (steps - step) / ((1 - WARM_UP) * steps),
    )


@torch.no_grad()
def evaluate(
    problem: Problem, model: torch.nn.Module, optimizer: torch.optim.Optimizer, half: int
) -> float:
    """Return the problem's figure on half of the held-out data."""
    for part in (model, optimizer):  # schedule-free AdamW evaluates other weights than it trains
        getattr(part, "eval", lambda: None)()
    found = (
        torch.cat([problem.score(model, batch) for batch in problem.held_out(half)]).mean().item()
    )
    for part in (model, optimizer):
        getattr(part, "train", lambda: None)()
    return found


def time_steps(problem: Problem, job: Job) -> dict[str, Any]:
    """Time the steps of all optimizers in turns.

    The result has the milliseconds of a step, and the bytes of state for each parameter.
    """
    batches, steps, optimizers, weights = problem.batches(problem.batch, 0), {}, {}, 0
    now: list[Batch] = []
    for name, setting in job["settings"].items():
        torch.manual_seed(0)
        model = problem.model().train()
        optimizers[name] = optimizer = make(model, setting)
        for group in optimizer.param_groups:
            group["lr"] = 1e-6  # the weights hardly change, so that none diverges
            if name == "thor-muon":
                group["update_interval"] = SPAN
        weights = sum(parameter.numel() for parameter in model.parameters())

        def step(
            model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            problem.loss(model, now[-1]).backward()
            problem.prepare(model)
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step

    def name_of(name: str) -> str:
        return f"{name} refresh" if getattr(optimizers[name], "last_refresh", ()) else name

    times = take_turns(
        steps,
        3 * SPAN,
        warm_up=SPAN,
        prepare=lambda: now.__setitem__(slice(None), [next(batches)]),
        name_of=name_of,
    )
    # Means within spans: SOAP computes its bases anew every 10 steps. ThorMuon's two kinds of steps
    # are told apart.
    spans = {
        name: statistics.median(
            statistics.fmean(own[i : i + SPAN]) for i in range(0, len(own), SPAN)
        )
        for name, own in times.items()
    }
    own = {name: state_bytes(o) / weights for name, o in optimizers.items()}
    return {
        "milliseconds": {name: round(1000 * value, 3) for name, value in spans.items()},
        "state_bytes": {name: round(value, 2) for name, value in own.items()},
    }


def optimizers(job: Job) -> list[str]:
    """Name ours among those that a job trains or times."""
    names = job.get("settings", [job.get("optimizer")])
    return sorted({CLASSES[name] for name in names if name in CLASSES})


# ---- what is run ---------------------------------------------------------------------------------


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known: which come next depends on what was best so far."""
    found, best_ones = [], chosen(rows)
    for problem in PROBLEMS:
        own = [job for name in contenders(problem) for job in tuning(rows, problem, name)]
        own += [
            job
            for (its, _), setting in best_ones.items()
            if its == problem
            for job in confirm(setting)
        ]
        own += confirm({"task": problem, **ONE})
        found += own
        if all(key_of(job) in rows for job in own):
            settings = {name: best_ones[problem, name] for name in PEERS} | {
                "thor-muon": {"task": problem, **ONE}
            }
            settings |= {
                name: best_ones[problem, name] for name in ("thor",) if problem in THOR_PROBLEMS
            }
            found.append({"task": problem, "settings": settings, "alone": True})
            for one in contests(
                rows, {key: value for key, value in best_ones.items() if key[0] == problem}, {}
            ):
                rival = one.chosen[one.rival]
                if is_close(one, rival):
                    found += confirm(rival, MORE_SEEDS) + confirm(
                        {"task": problem, **ONE}, MORE_SEEDS
                    )
    if all(key_of(job) in rows for job in found):
        rates = one_rates(rows)
        for name in PEERS:
            found += [job for problem in PROBLEMS for job in at_rates(problem, name)]
            same = {"optimizer": name, "lr": rates.get(name)}
            found += [
                job for problem in PROBLEMS if rates for job in confirm({"task": problem, **same})
            ]
    return found


def is_close(one: Contest, rival: Job) -> bool:
    """Return whether three seeds' figures differ by less than two standard errors.

    The standard error is that of the difference.
    """
    own, other = one.values(ONE)[: len(SEEDS)], one.values(rival)[: len(SEEDS)]
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
    return tables(contests(rows, chosen(rows), one_rates(rows)))


def draw(rows: Rows) -> None:
    """Draw the picture of four problems."""
    picture(contests(rows, chosen(rows), one_rates(rows)))


def contenders(problem: str) -> list[str]:
    """List the optimizers that are tuned on a problem."""
    return [*PEERS, "thor-muon", *(["thor", "thor-paper"] if problem in THOR_PROBLEMS else [])]


def confirm(setting: Job, seeds: tuple[int, ...] = SEEDS) -> list[Job]:
    """Return the runs of a setting with the seeds that count."""
    return [{**setting, "seed": seed} for seed in seeds]


def tuning(rows: Rows, problem: str, name: str) -> Iterator[Job]:
    """Yield the tuning runs of an optimizer, as far as they are known.

    The last ones are the first without which the next are not known.
    """
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
    for other in CONTENDERS[name].others:
        more = {key: value for key, value in other.items() if key != "factor"}
        yield {**found, "lr": float(f"{found['lr'] * other.get('factor', 1):.4g}"), **more}


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


# ---- one learning rate for all problems ----------------------------------------------------------


def candidates(name: str) -> list[float]:
    """Return the learning rates that may serve all problems: those around the first guess."""
    return [float(f"{CONTENDERS[name].lr * factor:.4g}") for factor in (0.25, 0.5, 1, 2)]


def at_rates(problem: str, name: str) -> list[Job]:
    """Return the tuning runs of an optimizer at these learning rates."""
    return [
        {"task": problem, "optimizer": name, "lr": lr, "seed": TUNING_SEED}
        for lr in candidates(name)
    ]


def one_rates(rows: Rows) -> dict[str, float]:
    """Return each peer's one learning rate for all problems; nothing while runs are missing."""
    found = {name: one_rate(rows, name) for name in PEERS}
    return (
        {} if None in found.values() else {name: lr for name, lr in found.items() if lr is not None}
    )


def one_rate(rows: Rows, name: str) -> float | None:
    """Return the learning rate with the smallest mean logarithm of errors over problems.

    The result is None where runs are missing.

    The error is the loss, or 1 - accuracy, and at most ten times the smallest of the optimizer on
    the problem.
    """
    total = dict.fromkeys(candidates(name), 0.0)
    for problem in PROBLEMS:
        errors = {}
        for job in at_rates(problem, name):
            if key_of(job) not in rows:
                return None
            value = rows[key_of(job)]["value"]
            errors[job["lr"]] = (
                math.inf if value is None else 1 - value if PROBLEMS[problem].higher else value
            )
        for lr, error in errors.items():
            total[lr] += math.log(min(10.0, error / min(errors.values())))
    return min(total, key=lambda lr: total[lr])


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of ThorMuon on each problem whose row README shows."""
    return [{"task": problem, **ONE, "seed": 0} for problem in PROBLEMS if problem in README]


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far a value may differ on another machine: as two seeds may."""
    return apart([rows[key_of({**job, "seed": seed})]["value"] for seed in SEEDS])
