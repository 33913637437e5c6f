"""The command line that the scripts of all comparisons share."""

import os
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence

from torch_thor.bench.runner import Job, complete
from torch_thor.bench.stores import Store
from torch_thor.training.errors import INTERRUPTED, UserError


def parser(about: str | None, *, workers: int | None = None) -> ArgumentParser:
    """Return a parser of the common options, to which a script can add its own.

    Args:
        about: The docstring of the script.
        workers: The default number of processes at a time; `None` for one per core.

    Returns:
        A parser of `--table` and `--workers`.
    """
    made = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--table", action="store_true", help="tables and pictures alone, from the raw data")
    add_workers(made, workers)
    return made


def add_workers(parser: ArgumentParser, workers: int | None = None) -> None:
    """Add the option --workers; `None` stands for one process per core."""
    parser.add_argument(
        "--workers",
        type=_at_least_one,
        default=workers or os.cpu_count() or 1,
        help="processes at a time, one thread each (default: %(default)s)",
    )


def measure(store: Store, stages: Sequence[Callable[[], Sequence[Job]]], workers: int, *, anew: bool = False) -> None:
    """Run the jobs whose results are missing, stage by stage.

    Args:
        store: The store of the results.
        stages: For each stage a function that returns its jobs, which may depend on results of earlier stages.
        workers: The number of processes at a time.
        anew: Whether to run all jobs, also those that have results.

    Raises:
        SystemExit: After a stage in which jobs have failed, with their names; after Ctrl-C; and if a result cannot be
            written. Results of finished jobs are kept.
    """
    for stage in stages:
        try:
            failures = complete(stage(), store, workers=workers, anew=anew, say=_say)
        except KeyboardInterrupt:
            _say("stopped by Ctrl-C: what is done is kept, and the same command goes on with the rest")
            raise SystemExit(INTERRUPTED) from None
        except UserError as error:  # a result that cannot be written
            raise SystemExit(str(error)) from error
        if failures:
            names = ", ".join(failure.key for failure in failures)
            raise SystemExit(
                f"{len(failures)} job{'s' if len(failures) > 1 else ''} failed ({names}): tracebacks are in "
                f"{store.folder}/*.failed; the same command runs what is missing"
            )


def _say(line: str) -> None:
    print(line, flush=True)


def _at_least_one(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise ArgumentTypeError(f"{text}: give a whole number of 1 or more")
    return int(text)
