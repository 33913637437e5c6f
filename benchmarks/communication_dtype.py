"""What it costs in quality to send factors and inverses in bfloat16 (``communication_dtype``).

    python benchmarks/communication_dtype.py            # trains what is missing in the raw data, then the table
    python benchmarks/communication_dtype.py --table    # prints the table from the raw data only

The raw data is results/communication_dtype.json.

Protocol. The task is the language model of ``tasks.py``: a transformer on characters, 64 wide. It is trained with DDP
on 2 processes of one thread each (gloo), each of which has the whole batch, with the defaults of THOR and of ThorMuon,
sending float32 and bfloat16, on the seeds 0, 1 and 2, which determine the initial weights and the order of the data.
The learning rate decreases linearly to 0. The result is the held-out loss at the end. The error of a step is measured
on the seed's weights at the start: the first update with bfloat16 beside that with float32, ``‖d − d'‖ / ‖d'‖`` over
all preconditioned weights.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from local_ranks import on_ranks
from tasks import TASKS
from torch_thor import THOR, Distributed, ThorMuon
from torch_thor.bench import describe, markdown, write_json
from torch_thor.training import Ranks, evaluate

OUT = Path(__file__).parent / "results" / "communication_dtype.json"
NAME, WORLD = "language", 2
SEEDS = (0, 1, 2)
FORMS = {"thor": THOR, "thor-spectral": ThorMuon}  # by their names in the raw data
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def train(rank: int, world: int, form: str, dtype: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Train on one of the processes."""
    benchmark = TASKS[NAME]
    count = steps or benchmark.steps
    task = benchmark.open(benchmark.recipe(seed))
    torch.manual_seed(seed)
    model = task.model()
    optimizer = FORMS[form](model, distributed=Distributed(communication_dtype=DTYPES[dtype]))
    weights = [layer.weight for layer in optimizer.curvature.values()]
    start = torch.cat([weight.detach().flatten() for weight in weights])
    wrapped = DistributedDataParallel(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / count)
    first = start
    for step, batch in zip(range(count), task.batches(Ranks(rank, world), 0), strict=False):
        optimizer.zero_grad()
        task.loss(wrapped, batch).mean.backward()
        optimizer.step()
        schedule.step()
        if step == 0:
            first = torch.cat([weight.detach().flatten() for weight in weights]) - start
    return {"loss": evaluate(task, model, Ranks())["loss"] if rank == 0 else None, "first": first}


def pair(form: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """Train with both dtypes."""
    started = time.perf_counter()
    found = {dtype: on_ranks(WORLD, train, form, dtype, seed, steps)[0] for dtype in DTYPES}
    exact, rounded = found["float32"]["first"], found["bfloat16"]["first"]
    return {
        "form": form,
        "seed": seed,
        "loss": {dtype: one["loss"] for dtype, one in found.items()},
        "error of the first update": float((rounded - exact).norm() / exact.norm()),
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(raw: dict[str, Any]) -> str:
    """Make the table."""
    rows = []
    for form in FORMS:
        runs = [run for run in raw["runs"] if run["form"] == form]
        cells, means = [], []
        for dtype in DTYPES:
            losses = [run["loss"][dtype] for run in runs]
            means.append(statistics.fmean(losses))
            cells.append(f"{means[-1]:.4f} ± {statistics.stdev(losses):.4f}")
        error = statistics.fmean(run["error of the first update"] for run in runs)
        rows.append([form, *cells, f"{100 * (means[1] / means[0] - 1):+.2f} %", f"{100 * error:.2f} %"])
    return markdown.table(["step", *DTYPES, "difference of the means", "error of the first update"], rows)


def main() -> None:
    """Train what is missing, and print the table."""
    raw = json.loads(OUT.read_text()) if OUT.exists() else {"machine": {**describe(), "threads": 1}, "runs": []}
    if "--table" not in sys.argv[1:]:
        done = {(run["form"], run["seed"]) for run in raw["runs"]}
        for seed in SEEDS:
            for form in FORMS:
                if (form, seed) not in done:
                    raw["runs"].append(pair(form, seed))
                    print(raw["runs"][-1], flush=True)
                    write_json(OUT, raw, indent=1)
    print(table(raw))


if __name__ == "__main__":
    main()
