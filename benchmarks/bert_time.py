"""Step time of the optimizers of bert.py over AdamW's, side by side in one run.

    python benchmarks/bert_time.py --corpus corpora/debian

All take turns step by step, on one thread, so that a machine whose speed drifts slows them alike. The figure of a peer
is the median over spans of 10 rounds of the mean time in a span (SOAP renews its eigenbases every 10 steps). That of
THOR and ThorMuon is made of the medians of ordinary steps and of those that refresh, as many of each as a run has.
A step is that of the training loop, with the parts of a batch, the loss and its recording.
"""

import argparse
import itertools
import json
import statistics
from copy import copy
from pathlib import Path

import torch

from bert import CONTESTS, CORPUS, GRIDS, Contest, Setting, open_task
from torch_thor import THOR, ThorMuon
from torch_thor.bench import describe, run_of, step_of, take_turns, write_json
from torch_thor.training import Batch, Ranks
from torch_thor.training.tasks.masked_lm import MaskedLM

OUT = Path(__file__).parent / "results" / "step_time_bert.json"
SPAN = 10


def refreshes(optimizer: THOR | ThorMuon, steps: int) -> int:
    """Count the steps of a run that refresh, from the optimizer's own interval."""
    interval = optimizer.param_groups[0]["update_interval"]
    count, step = 0, 0
    while step < steps:
        count, step = count + 1, step + (interval(step) if callable(interval) else interval)
    return count


def seconds(task: MaskedLM, contest: Contest, spans: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Time the steps of a contest."""
    batches = task.batches(Ranks(), 0)
    now: list[Batch] = [next(batches)]
    task = copy(task)
    task.batches = lambda *_: (now[0] for _ in itertools.count())
    steps, thors, counts = {}, dict[str, THOR | ThorMuon](), dict[str, int]()
    for name, (_, momenta) in GRIDS.items():
        run = run_of(task.recipe, task, Setting(name, 1e-5, momenta[0], 1e-5 if name == "muon" else None).make)
        optimizer, steps[name] = run.optimizer, step_of(run)
        if isinstance(optimizer, THOR | ThorMuon):
            thors[name], counts[name] = optimizer, refreshes(optimizer, contest.steps)
            for group in optimizer.param_groups:
                group["update_interval"] = SPAN

    def next_batch() -> None:
        now[:] = [next(batches)]  # the same for all of them

    def name_of(name: str) -> str:
        return f"{name} refresh" if name in thors and thors[name].last_refresh else name

    return take_turns(steps, spans * SPAN, warm_up=SPAN, prepare=next_batch, name_of=name_of), counts


def costs(contest: Contest, times: dict[str, list[float]], counts: dict[str, int]) -> dict[str, float]:
    """Return what a step costs, on average over a run."""
    found = {}
    for name in GRIDS:
        if name in counts:
            ordinary, refresh = (statistics.median(times[key]) for key in (name, f"{name} refresh"))
            share = counts[name] / contest.steps
            found |= {f"{name} ordinary": ordinary, f"{name} refresh": refresh}
            found[name] = ordinary + share * (refresh - ordinary)
        else:
            spans = [statistics.fmean(times[name][i : i + SPAN]) for i in range(0, len(times[name]), SPAN)]
            found[name] = statistics.median(spans)
    return found


def main() -> None:
    """Time the steps, print the ratios and write the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="the prepared corpus (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, choices=[contest.batch_size for contest in CONTESTS], help="one batch size alone"
    )
    parser.add_argument("--spans", type=int, default=15, help=f"spans of {SPAN} rounds, after one that is not counted")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(options.out.read_text()) if options.batch and options.out.exists() else {}  # keep the other size
    raw, ratios = found.get("seconds", {}), found.get("ratio_to_adamw", {})
    for contest in CONTESTS:
        if options.batch not in (None, contest.batch_size):
            continue
        times, counts = seconds(open_task(contest, 0, options.corpus), contest, options.spans)
        cost = costs(contest, times, counts)
        raw[str(contest)] = times
        ratios[str(contest)] = {name: round(value / cost["adamw"], 3) for name, value in cost.items()}
        print(contest, ratios[str(contest)], flush=True)
    write_json(options.out, {"machine": describe(), "ratio_to_adamw": ratios, "seconds": raw}, indent=1)


if __name__ == "__main__":
    main()
