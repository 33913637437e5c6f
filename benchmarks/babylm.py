"""The curve of a training with BabyLM's settings, as raw data and a table, from the folder of its run.

    apt-get install -y anarchism python3.11-doc perl-doc
    torch-thor prepare /usr/share/doc/anarchism/html /usr/share/doc/python3.11/html /usr/share/perl/5.36.0/pod \
        --out corpora/debian-30522 --vocab-size 30522 --seq-len 128
    torch-thor train bert-babylm data.root=corpora/debian-30522 precision=bf16 eval_interval=250 --out runs/babylm
    python benchmarks/babylm.py runs/babylm    # also for a run that was stopped
    python benchmarks/babylm.py --table        # prints the table from the raw data only

On two cores the training takes about three hours.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_thor.bench import describe, write_json
from torch_thor.bench.markdown import table

RAW = Path(__file__).parent / "results" / "bert_babylm.json"
PUBLISHED = 3.03  # masked-token loss after 10,000 steps, on another text
SPAN = 50  # steps over which the training loss is averaged


def curve(lines: Iterable[str]) -> dict[str, Any]:
    """Read the metrics of a run.

    Args:
        lines: The lines of `metrics.jsonl`. A run that was stopped and resumed may hold a step twice: the later counts.

    Returns:
        `evaluations`, with `step`, `loss` and `accuracy` each; `training_loss`, pairs of a step
        and the mean over the 50 steps up to it; `median_step`, seconds.
    """
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for line in lines:
        point = json.loads(line)
        if point["kind"] == "step":
            steps[point["step"]] = point
        elif point["kind"] == "eval":
            evaluations[point["step"]] = {
                "step": point["step"],
                "loss": point["loss"],
                "accuracy": point["mlm_accuracy"],
            }
    last = max(steps)
    means = [
        (end, statistics.fmean(steps[step]["loss"] for step in range(end - SPAN + 1, end + 1)))
        for end in range(SPAN, last + 1, SPAN)
    ]
    return {
        "steps": last,
        "median_step": statistics.median(point["duration"] for point in steps.values()),
        "evaluations": list(evaluations.values()),
        "training_loss": means,
    }


def rows(evaluations: Iterable[dict[str, Any]], every: int) -> list[list[str]]:
    """Write evaluations as cells of the table.

    Args:
        evaluations: As :func:`curve` returns them.
        every: Steps between two rows; the last evaluation always has one.

    Returns:
        Step, masked-token loss and accuracy.
    """
    all_of_them = list(evaluations)
    chosen = [e for e in all_of_them if e["step"] % every == 0 or e is all_of_them[-1]]
    return [[f"{e['step']:,}", f"{e['loss']:.2f}", f"{100 * e['accuracy']:.1f} %"] for e in chosen]


def main() -> None:
    """Write the raw data of a run, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="the folder of the run")
    parser.add_argument("--table", action="store_true", help="print the table from the raw data only")
    given = parser.parse_args()
    if (given.run is None) != given.table:
        parser.error("give the folder of a run, or --table")
    if given.run is not None:
        metrics = given.run / "adamw" / "metrics.jsonl"
        if not metrics.is_file():
            parser.error(f"{metrics} does not exist: give the folder that `torch-thor train bert-babylm --out` wrote")
        recipe = (given.run / "recipe.yaml").read_text(encoding="utf-8")
        with metrics.open(encoding="utf-8") as lines:
            write_json(RAW, {**describe(), "recipe": recipe, **curve(lines)})
    found = json.loads(RAW.read_text(encoding="utf-8"))
    print(table(["steps", "held-out loss", "accuracy"], rows(found["evaluations"], 1000)))
    print(f"\n{found['steps']:,} steps of {found['median_step']:.2f} s (median); published after 10,000: {PUBLISHED}")


if __name__ == "__main__":
    main()
