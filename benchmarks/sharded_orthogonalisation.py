"""ThorMuon under FSDP2: rows of each process on their own, or whole matrices.

    python benchmarks/sharded_orthogonalisation.py            # trains what is missing in the raw data, then the table
    python benchmarks/sharded_orthogonalisation.py --table    # prints the table from the raw data only

The raw data is results/sharded_orthogonalisation.json.

Protocol. The task is the language model of ``tasks.py``: a transformer on characters, 64 wide. It has no batch
normalisation, whose statistics would differ on each process. It is trained with ThorMuon's defaults on 1, 2 and 4
processes of one thread each (gloo), each of which has the whole batch, with ``whole_matrices`` False and True, on the
seeds 0, 1 and 2. A seed determines the initial weights and the order of the data. The learning rate decreases linearly
to 0. The result is the held-out loss at the end.

More processes than cores share the cores, so the benchmark says nothing about the time of a step.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from tasks import TASKS
from torch_thor import Distributed, ThorMuon
from torch_thor.bench import describe, markdown, write_json
from torch_thor.training import Ranks, evaluate

OUT = Path(__file__).parent / "results" / "sharded_orthogonalisation.json"
NAME = "language"
PROCESSES = (1, 2, 4)
SEEDS = (0, 1, 2)


def train(rank: int, world: int, folder: str, whole: bool, seed: int) -> None:
    """Train on one of the processes; the first one writes the held-out loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    benchmark = TASKS[NAME]
    task = benchmark.open(benchmark.recipe(seed))
    torch.manual_seed(seed)
    model = task.model()
    fully_shard(model)
    optimizer = ThorMuon(model, distributed=Distributed(whole_matrices=whole))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / benchmark.steps)
    for _, batch in zip(range(benchmark.steps), task.batches(Ranks(rank, world), 0), strict=False):
        optimizer.zero_grad()
        task.loss(model, batch).mean.backward()
        optimizer.step()
        schedule.step()
    # each process evaluates everything, because FSDP needs all of them in each forward pass
    loss = evaluate(task, model, Ranks())["loss"]
    if rank == 0:
        Path(folder, "loss").write_text(str(loss))
    dist.destroy_process_group()


def run(world: int, *, whole: bool, seed: int) -> dict[str, Any]:
    """Train once."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (world, folder, whole, seed), nprocs=world)
        loss = float(Path(folder, "loss").read_text())
    seconds = round(time.perf_counter() - start, 1)
    return {"task": NAME, "processes": world, "whole": whole, "seed": seed, "loss": loss, "seconds": seconds}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the result as Markdown."""
    heads = ("processes", "rows of each process", "whole matrices", "difference of the means")
    lines = []
    for world in PROCESSES:
        means, cells = [], []
        for whole in (False, True):
            losses = [row["loss"] for row in rows if (row["processes"], row["whole"]) == (world, whole)]
            means.append(statistics.fmean(losses))
            cells.append(f"{means[-1]:.4f} ± {statistics.stdev(losses):.4f}")
        lines.append((str(world), *cells, f"{100 * (means[0] / means[1] - 1):+.1f} %"))
    return markdown.table(heads, lines)


def main() -> None:
    """Train what is missing, and print the table."""
    stored = raw_data() if OUT.exists() else {"machine": describe(), "runs": []}
    if "--table" not in sys.argv[1:]:
        done = {(r["processes"], r["whole"], r["seed"]) for r in stored["runs"]}
        for world in PROCESSES:
            for seed in SEEDS:
                for whole in (False, True):
                    if (world, whole, seed) not in done:
                        stored["runs"].append(run(world, whole=whole, seed=seed))
                        print(stored["runs"][-1], flush=True)
                        write_json(OUT, stored)
    print(table(stored["runs"]))


def raw_data() -> dict[str, Any]:
    """Return the raw data."""
    found: dict[str, Any] = json.loads(OUT.read_text())
    return found


if __name__ == "__main__":
    main()
