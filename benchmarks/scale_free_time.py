"""Step time of the optimizers of scale_free.py over SGD's, side by side in one run.

    python benchmarks/scale_free_time.py

All take turns step by step, on one thread, so that a machine whose speed drifts slows them alike. THOR refreshes, and
SOAP renews its eigenbases, every 10 steps: the figure is the median over spans of 10 rounds of the time that a span
takes, over the median of SGD's.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from contenders import CONTENDERS, THOR_DAMPING, make
from machine import describe
from tasks import TASKS

OUT = Path(__file__).parent / "results" / "step_time_scale_free.json"
SPAN = 10


def main() -> None:
    """Time the steps, print a table and write the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=5, help=f"spans of {SPAN} rounds, after one that is not counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, dict[str, float]] = {}
    raw: dict[str, dict[str, list[float]]] = {}
    for key, task in TASKS.items():
        trainings = {}
        for name in (*CONTENDERS, "thor"):
            torch.manual_seed(0)
            model = task.build()
            trainings[name] = (model, make(name, model, 1e-5, THOR_DAMPING if name == "thor" else None))
        seconds: dict[str, list[float]] = {name: [] for name in trainings}
        batches = task.batches(0)
        for _ in range((options.spans + 1) * SPAN):
            batch = next(batches)
            for name, (model, optimizer) in trainings.items():
                started = time.perf_counter()
                task.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                seconds[name].append(time.perf_counter() - started)
        spans = {
            name: [sum(times[i : i + SPAN]) for i in range(SPAN, len(times), SPAN)] for name, times in seconds.items()
        }
        middle = {name: statistics.median(values) for name, values in spans.items()}
        ratios[key] = {name: round(value / middle["sgd"], 3) for name, value in middle.items()}
        raw[key] = spans
        print(key, ratios[key], flush=True)
    OUT.write_text(json.dumps({"machine": describe(threads=1), "ratio_to_sgd": ratios, "spans": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
