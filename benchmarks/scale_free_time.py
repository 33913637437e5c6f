"""Time per step of the optimizers of scale_free.py, divided by that of SGD, measured in one run.

    python benchmarks/scale_free_time.py

All optimizers take turns step by step on one thread, so a change in the speed of the machine affects all of them alike.
The result for every optimizer except THOR is the median over spans of 10 rounds of the mean time in a span (SOAP
computes its eigenbases again every 10 steps). The result for THOR combines the median of its ordinary steps and that of
its refresh steps, weighted by their numbers in a run. The tasks are those of scale_free.py. The steps are not taken by
the loop of the application, because it finishes one training before it starts the next.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from contenders import PEERS, USUAL_MOMENTUM, Setting
from tasks import TASKS, Benchmark
from torch_thor.bench import describe, take_turns, training_step, write_json
from torch_thor.intervals import Geometric
from torch_thor.training import Batch, Ranks

OUT = Path(__file__).parent / "results" / "step_time_scale_free.json"
SPAN = 10
INTERVAL = Geometric(1, 50, factor=1.5)  # the default of ThorMuon


def refreshes(steps: int) -> int:
    """Return how many steps of a run of THOR refresh."""
    count, step = 0, 0
    while step < steps:
        count, step = count + 1, step + INTERVAL(step)
    return count


def seconds(benchmark: Benchmark, spans: int) -> dict[str, list[float]]:
    """Time the steps of a task."""
    task = benchmark.open(benchmark.recipe(0))
    batches, now = task.batches(Ranks(), 0), list[Batch]()

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        return training_step(lambda: task.loss(model, now[0]).mean, optimizer)

    steps = {}
    for name in (*PEERS, "thor"):
        torch.manual_seed(0)
        model = task.model()
        optimizer = Setting(name, 1e-5, USUAL_MOMENTUM.get(name)).make(model)
        steps[name] = step_of(model, optimizer)
    thor = optimizer  # the last of them
    for group in thor.param_groups:
        group["update_interval"] = SPAN

    def next_batch() -> None:
        now[:] = [next(batches)]  # the same for all of them

    def name_of(name: str) -> str:
        return "thor refresh" if name == "thor" and thor.last_refresh else name

    return take_turns(steps, spans * SPAN, warm_up=SPAN, prepare=next_batch, name_of=name_of)


def costs(benchmark: Benchmark, times: dict[str, list[float]]) -> dict[str, float]:
    """Return what a step costs."""
    found = {
        name: statistics.median(statistics.fmean(times[name][i : i + SPAN]) for i in range(0, len(times[name]), SPAN))
        for name in PEERS
    }
    ordinary, refresh = (statistics.median(times[name]) for name in ("thor", "thor refresh"))
    share = refreshes(benchmark.steps) / benchmark.steps
    return {
        **found,
        "thor": ordinary + share * (refresh - ordinary),
        "thor ordinary": ordinary,
        "thor refresh": refresh,
    }


def main() -> None:
    """Time the steps, print a table and write the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=6, help=f"spans of {SPAN} rounds, after one that is not counted")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw = {key: seconds(TASKS[key], options.spans) for key in options.tasks}
    ratios = {}
    for key, times in raw.items():
        cost = costs(TASKS[key], times)
        ratios[key] = {name: round(value / cost["sgd"], 3) for name, value in cost.items()}
        print(key, ratios[key], flush=True)
    write_json(options.out, {"machine": describe(), "ratio_to_sgd": ratios, "seconds": raw}, indent=1)


if __name__ == "__main__":
    main()
