"""The runner of a study, whose results are the lines of benchmarks/results/STUDY.jsonl.

A study defines ``jobs(rows)``, which lists the jobs that are known from the results so far,
``run(job)``, ``optimizers(job)``, which names the classes of ours that make the result, and
``table(rows)``, perhaps ``draw(rows)``; jobs and results are mappings of JSON values.
``headlines(rows)`` lists a cheap job for each number that README shows, ``tolerance(rows, job)``
how far a job's value may differ on another machine. A job with the entry ``alone`` runs when no
other does, because its time counts.

Results are stored as they come, and a study that was cut off goes on.
"""

import importlib
import multiprocessing
import os
import threading
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from benchmarks.runner.golden import is_stale, numbers_of
from benchmarks.runner.machine import provenance
from benchmarks.runner.stores import Lines, key_of
from torch_thor.errors import UserError, first_line, require
from torch_thor.files import write_text
from torch_thor.training.data.batches import allowed_cores

RESULTS = Path(__file__).parents[1] / "results"
Row = dict[str, Any]
Job = Mapping[str, Any]


class Parser(ArgumentParser):
    """A parser of options that raises a `UserError` for bad options."""

    def error(self, message: str) -> NoReturn:
        """Refuse an option."""
        raise UserError(f"{message}: `{self.prog} --help` says what is there")


def main(study: ModuleType) -> None:
    """Run what is missing of a study, then print and write its tables, and draw its pictures."""
    options, name = _options(study), study.__name__
    store = Lines(RESULTS / f"{_short(name)}.jsonl")
    if options.verify:
        raise SystemExit(verify(name, store, options.workers, options.only))
    if not options.table:
        complete(name, study.jobs, store, workers=options.workers, only=options.only)
    tables = study.table(store.rows)
    print(tables)
    write_text(store.path.with_suffix(".md"), page(_short(name), tables))
    if hasattr(study, "draw"):
        study.draw(store.rows)
    stale = sum(map(is_stale, store.rows.values()))
    if stale:
        what = "whose optimizers take other steps by now"
        print(f"\nstale: {stale} of {len(store.rows)} rows are of earlier numbers, {what}")


def page(name: str, tables: str) -> str:
    """Return the file of a study's tables, which lies beside its raw data."""
    return f"# python -m benchmarks {name}\n\n{tables}\n"


def _options(study: ModuleType) -> Namespace:
    made = Parser(description=study.__doc__, formatter_class=RawDescriptionHelpFormatter)
    told = "only tables and pictures, from the raw data"
    made.add_argument("--table", action="store_true", help=told)
    told = "run one seed of each headline again, and compare"
    made.add_argument("--verify", action="store_true", help=told)
    told = "only jobs whose key contains this, such as 'task unet'"
    made.add_argument("--only", default="", help=told)
    told, cores = "processes at a time (default: %(default)s)", allowed_cores()
    made.add_argument("--workers", type=int, default=cores, help=told)
    options = made.parse_args()
    require(options.workers > 0, f"--workers {options.workers}: give a whole number of 1 or more")
    return options


def _short(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]


def complete(
    name: str,
    jobs: Callable[[Mapping[str, Row]], Sequence[Job]],
    store: Lines,
    *,
    workers: int,
    only: str,
) -> None:
    """Run the jobs of a study whose results are missing, until no result leads to another job."""
    while True:
        todo = [
            job for job in jobs(store.rows) if key_of(job) not in store.rows and only in key_of(job)
        ]
        together = [job for job in todo if not job.get("alone")]
        if not todo:
            return
        measure(name, store, together or todo, workers if together else 1)


def verify(name: str, store: Lines, workers: int, only: str = "") -> int:
    """Run the headlines again, and print each value beside the recorded value."""
    study = importlib.import_module(name)
    require(hasattr(study, "headlines"), f"{_short(name)}: README shows none of its numbers")
    every = study.headlines(store.rows)
    jobs = [job for job in every if only in key_of(job)]
    known = "\n".join(map(key_of, every))
    require(bool(jobs), f"--only {only}: no row that README shows has this; they are\n{known}")
    missing = [key_of(job) for job in jobs if key_of(job) not in store.rows]
    require(
        not missing,
        f"{len(missing)} rows to compare with are missing, which `python -m benchmarks "
        f"{_short(name)}` runs:\n" + "\n".join(missing),
    )
    again, far = Lines(store.path.with_suffix(".verify")), 0
    again.rows.clear()
    measure(name, again, jobs, workers)
    again.path.unlink()
    for job in jobs:
        key = key_of(job)
        old, new = store.rows[key]["value"], again.rows[key]["value"]
        near = new is not None and abs(old - new) <= study.tolerance(store.rows, job)
        far += not near
        now = "diverged" if new is None else f"{new:.6g}"
        print(f"{key}: recorded {old:.6g}, now {now}: {'agrees' if near else 'DIFFERS'}")
    return int(far > 0)


def measure(name: str, store: Lines, jobs: Sequence[Job], workers: int) -> None:
    """Run jobs in processes, and store each result; after a failure the others go on."""
    context, failed = multiprocessing.get_context("spawn"), []
    first = {key_of(job): job for job in jobs}
    with ProcessPoolExecutor(workers, context, initializer=_end_with_parent) as pool:
        running = {pool.submit(result_of, name, job): key for key, job in first.items()}
        try:
            for number, future in enumerate(as_completed(running), start=1):
                key, error = running[future], future.exception()
                if error is None:
                    store.keep(key, future.result())
                    print(f"{number} of {len(first)} done: {key}")
                else:
                    failed.append(f"{key}: {type(error).__name__}: {first_line(error)}")
                    print(f"{number} of {len(first)} failed: {failed[-1]}")
        except BaseException:  # Ctrl-C, or a full disk: what has not begun is not run for nothing
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    require(
        not failed,
        f"{len(failed)} jobs failed, which the same command runs again:\n" + "\n".join(failed),
    )


def result_of(name: str, job: Job) -> Row:
    """Run a job, and return the result with what it was measured on."""
    study = importlib.import_module(name)
    return {
        "job": dict(job),
        **study.run(dict(job)),
        "numbers": numbers_of(study.optimizers(job)),
        **provenance(),
        "command": f"python -m benchmarks {_short(name)}",
    }


def _end_with_parent() -> None:
    """Let this process end when its parent, which stores the result, has been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
