"""Step time of the optimizers of scale_free.py over SGD's, side by side in one run.

    python benchmarks/scale_free_time.py

All take turns step by step, on one thread, so that a machine whose speed drifts slows them alike. The figure of a peer
is the median over spans of 10 rounds of the mean time in a span (SOAP renews its eigenbases every 10 steps). That of
THOR is made of the medians of its ordinary steps and of those that refresh, as many of each as a run has.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from machine import describe

from contenders import PEERS, USUAL_MOMENTUM, Setting
from tasks import TASKS
from torch_thor.optim.options import SCALED_DEFAULTS

OUT = Path(__file__).parent / "results" / "step_time_scale_free.json"
SPAN = 10
INTERVAL = SCALED_DEFAULTS["spectral"]["update_interval"]


def refreshes(steps: int) -> int:
    """Return how many steps of a run of THOR refresh.

    Args:
        steps: length of the run.

    Returns:
        Their number.
    """
    count, step = 0, 0
    while step < steps:
        count, step = count + 1, step + INTERVAL(step)
    return count


def main() -> None:
    """Time the steps, print a table and write the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=6, help=f"spans of {SPAN} rounds, after one that is not counted")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, dict[str, float]] = {}
    raw: dict[str, dict[str, list[float]]] = {}
    for key in options.tasks:
        task = TASKS[key]
        trainings = {}
        for name in (*PEERS, "thor"):
            torch.manual_seed(0)
            model = task.build()
            trainings[name] = (model, Setting(name, 1e-5, USUAL_MOMENTUM.get(name)).make(model))
        thor = trainings["thor"][1]
        for group in thor.param_groups:
            group["update_interval"] = SPAN
        seconds: dict[str, list[float]] = {name: [] for name in (*trainings, "thor refresh")}
        batches = task.batches(0)
        for turn in range((options.spans + 1) * SPAN):
            batch = next(batches)
            for name, (model, optimizer) in trainings.items():
                started = time.perf_counter()
                task.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if turn >= SPAN:
                    refreshed = name == "thor" and thor.last_refresh
                    seconds["thor refresh" if refreshed else name].append(time.perf_counter() - started)
        cost = {
            name: statistics.median(statistics.fmean(times[i : i + SPAN]) for i in range(0, len(times), SPAN))
            for name, times in seconds.items()
            if name in PEERS
        }
        ordinary, refresh = (statistics.median(seconds[name]) for name in ("thor", "thor refresh"))
        share = refreshes(task.steps) / task.steps
        cost |= {"thor": ordinary + share * (refresh - ordinary), "thor ordinary": ordinary, "thor refresh": refresh}
        ratios[key] = {name: round(value / cost["sgd"], 3) for name, value in cost.items()}
        raw[key] = seconds
        print(key, ratios[key], flush=True)
    options.out.write_text(
        json.dumps({"machine": describe(threads=1), "ratio_to_sgd": ratios, "seconds": raw}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
