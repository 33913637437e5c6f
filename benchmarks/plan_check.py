"""The predictions of `torch-thor plan` beside trainings on 1, 2 and 4 processes of this machine.

    python benchmarks/plan_check.py             # ResNet-18 (64 pixels) and BERT-mini (64 tokens)
    python benchmarks/plan_check.py --table     # the table alone, from the raw data

Each process measures the costs as `torch-thor plan` does, while all others do the same, and then trains with DDP and
with FSDP2 (gloo, one thread each). With more processes than cores, all of this is oversubscribed alike. Times are the
processor time of the thread that computes, without waiting for the network or for a core. Prediction and measurement
are compared in each process; the table has the median over the processes of the prediction over the measurement. Bytes
are those of the collectives that `optimizer.step()` starts on a refresh.
"""

import argparse
import contextlib
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from local_ranks import loss, made, on_ranks, parallel, sized, thor
from torch_thor import THOR
from torch_thor.bench import describe, write_json
from torch_thor.bench.markdown import table
from torch_thor.tools.plan import measure, rows_of
from torch_thor.tools.traffic import Collective

FOLDER = Path(__file__).parent / "results" / "plan"
MODELS, WORLDS = ("resnet18", "bert-mini"), (1, 2, 4)
PIXELS, LENGTH, SPLIT = 64, 64, 128
CPU = torch.device("cpu")
NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast")


def checked(rank: int, world: int, word: str, local_batch: int, rounds: int) -> dict[str, Any]:
    """Predict and measure in one process.

    Args:
        rank: Its rank.
        world: Number of processes.
        word: The model.
        local_batch: Samples of each process.
        rounds: Steps of each kind that count.

    Returns:
        For `DDP` and `FSDP2` seconds and bytes, predicted and measured.
    """
    warnings.simplefilter("ignore")
    dist.barrier()
    with mock.patch("time.perf_counter", time.thread_time):
        measured = measure(word, sized(word, PIXELS, LENGTH), "thor", {"split_dim": SPLIT}, CPU, local_batch)
    found: dict[str, Any] = {"costs": vars(measured)}
    for form in ("DDP", "FSDP2"):
        sharded = form == "FSDP2"
        subject = made(word, local_batch, PIXELS, LENGTH)
        whole = THOR(subject.model, split_dim=SPLIT)
        (row,) = rows_of(whole, "fsdp" if sharded and world > 1 else "ddp", world, 2)
        ordinary, _, refresh = row.seconds(measured, math.inf, 0.0)
        subject = made(word, local_batch, PIXELS, LENGTH)
        model = parallel(subject.model, world, sharded=sharded)
        optimizer = thor(subject.model)
        seconds: dict[str, list[float]] = {"ordinary": [], "refresh": [], "forward and backward": [], "step": []}
        counted: list[int] = []
        for turn in range(2 * (rounds + 1)):
            dist.barrier()
            started = time.thread_time()
            loss(model, subject).backward()
            passed = time.thread_time()
            with counting(counted, world):
                optimizer.step()
            ended = time.thread_time()
            optimizer.zero_grad()
            if turn < 2:
                continue
            seconds["ordinary" if turn % 2 else "refresh"].append(ended - started)
            if turn % 2:
                seconds["forward and backward"].append(passed - started)
                seconds["step"].append(ended - passed)
        found[form] = {
            "predicted": {"ordinary": ordinary, "refresh": refresh},
            "seconds": seconds,
            "bytes predicted": row.sent_more,
            "bytes measured": counted[2],  # of the second refresh; the first finds out whether the loss is a sum
        }
    return found


@contextlib.contextmanager
def counting(counted: list[int], world: int) -> Any:
    """Count the bytes that collectives send.

    Args:
        counted: Receives the bytes of the block.
        world: Number of processes.

    Yields:
        Nothing.
    """
    sent = 0

    def watched(really: Any, name: str) -> Any:
        def collective(output: Any, *given: Any, **options: Any) -> Any:
            nonlocal sent
            passed = given[0] if given and torch.is_tensor(given[0]) else output
            sent += Collective(name, world, passed.nbytes, output.nbytes).sent
            return really(output, *given, **options)

        return collective

    with contextlib.ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(dist, name, watched(getattr(dist, name), name)))
        yield
    counted.append(sent)


def ratios(ranks: list[dict[str, Any]], form: str, kind: str) -> list[float]:
    """Return prediction over measurement.

    Args:
        ranks: What the processes found.
        form: `DDP` or `FSDP2`.
        kind: `ordinary` or `refresh`.

    Returns:
        One ratio for each process.
    """
    return [one[form]["predicted"][kind] / statistics.median(one[form]["seconds"][kind]) for one in ranks]


def tables(raw: dict[str, Any]) -> str:
    """Make the table.

    Args:
        raw: The raw data.

    Returns:
        Markdown.
    """
    rows = []
    for word, worlds in raw["models"].items():
        for world, ranks in worlds.items():
            for form in ("DDP", "FSDP2"):
                cells = [f"{statistics.median(ratios(ranks, form, kind)):.2f}" for kind in ("ordinary", "refresh")]
                pairs = {(one[form]["bytes predicted"], one[form]["bytes measured"]) for one in ranks}
                equal = all(predicted == measured for predicted, measured in pairs)
                sent = ", ".join(f"{measured:,}" for _, measured in sorted(pairs))
                rows.append([word, world, form, *cells, f"{sent} ({'equal' if equal else 'not equal'})"])
    return table(["model", "processes", "form", "ordinary step", "step with refresh", "bytes of a refresh"], rows)


def main() -> None:
    """Measure, write the raw data, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="the table alone, from the raw data")
    parser.add_argument("--models", nargs="+", default=MODELS, help="default: %(default)s")
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, help="default: %(default)s")
    parser.add_argument("--local-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "check.json")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        found: dict[str, Any] = {}
        for word in options.models:
            for world in options.worlds:
                ranks = on_ranks(world, checked, word, options.local_batch, options.rounds)
                found.setdefault(word, {})[str(world)] = ranks
                print(f"{word} on {world}: done", flush=True)
        settings = {"local_batch": options.local_batch, "rounds": options.rounds, "pixels": PIXELS, "length": LENGTH}
        raw = {"machine": describe(), "settings": {**settings, "split_dim": SPLIT, "seed": 0}, "models": found}
        write_json(options.out, raw, indent=1)
    print(tables(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
