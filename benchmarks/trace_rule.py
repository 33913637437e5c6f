"""What the trace rule saves and what it costs: Fashion-MNIST, small ResNet, the paper's three settings.

    python benchmarks/trace_rule.py                # what is missing under results/trace_rule, then table and picture
    python benchmarks/trace_rule.py --table        # the table and the picture alone, from the raw data

Protocol. The recipe ``fashion-mnist`` as it stands (lr 0.05, damping 0.03, a refresh step every 20 steps, 2 epochs),
with ``trace_thresholds`` of THOR, THOR_stop and THOR_NT, seeds 0, 1 and 2; a seed decides the initial weights and the
order of the data, the same for every setting. A refresh is one layer taking and inverting new factors; as many are
possible as there are layers times refresh steps. A setting's accuracy counts as kept if its mean over the seeds is no
more than one standard deviation of THOR_NT's (of the sample, n - 1) below THOR_NT's mean.

What it is not: a test of the rule on the network for which the paper chose its thresholds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "trace_rule"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "refreshes.png"
DRAWN = ("thor_stop", 1)
BASELINE = "thor_nt"
SETTINGS = ("thor", "thor_stop", "thor_nt")  # as THOR.preset names them
SEEDS = (0, 1, 2)


def run_file(setting: str, seed: int) -> Path:
    """Return where a run's raw data stands.

    Args:
        setting: its name.
        seed: seed.

    Returns:
        A path.
    """
    return RESULTS / f"{setting}-seed{seed}.json"


def train_one(setting: str, seed: int) -> None:
    """Train once, in this process on one thread, and write the raw data.

    Args:
        setting: its name.
        seed: seed.
    """
    import torch

    from machine import describe
    from torch_thor.training.config.recipe import load_recipe, recipe_yaml
    from torch_thor.training.data.in_memory import load_data
    from torch_thor.training.engine.loop import train
    from torch_thor.training.experiment import image_run as new_run

    torch.set_num_threads(1)
    overrides = ["optimizer=thor", f"trace_thresholds={setting}", f"seed={seed}", "eval_interval=156", "device=cpu"]
    recipe = load_recipe("fashion-mnist", overrides)
    run = new_run(recipe, "thor", load_data(recipe.data))
    record = train(run)
    result = {
        "setting": setting,
        "seed": seed,
        "steps": run.total_steps,
        "evaluations": [[e.step, e.top1, round(e.seconds, 2)] for e in record.evaluations],
        "loss": [round(point.loss, 5) for point in record.steps],
        "layers": list(run.optimizer.curvature),
        # step (from 1), layer (place in the list), decision, Δ, tr(F + λI)
        "refreshes": [
            [p.step, list(run.optimizer.curvature).index(p.layer), p.decision, p.trace_change, p.trace]
            for p in record.refreshes
        ],
        "seconds_ordinary_step": record.median_duration(refresh=False),
        "seconds_refresh_step": record.median_duration(refresh=True),
        "machine": describe(threads=1),
        "recipe": recipe_yaml(recipe),
    }
    path = run_file(setting, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result) + "\n")
    temporary.rename(path)


def complete() -> None:
    """Run the jobs whose raw data is missing, one at a time, each in a process of its own."""
    for setting in SETTINGS:
        for seed in SEEDS:
            if not run_file(setting, seed).exists():
                words = [sys.executable, __file__, "--one", setting, str(seed)]
                subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                print("done", setting, seed, flush=True)


def load(setting: str) -> list[dict[str, Any]]:
    """Return a setting's raw data.

    Args:
        setting: its name.

    Returns:
        What :func:`train_one` wrote, seed by seed.
    """
    return [json.loads(run_file(setting, seed).read_text()) for seed in SEEDS]


def finals(setting: str) -> list[float]:
    """Return a setting's final accuracies.

    Args:
        setting: its name.

    Returns:
        One a seed.
    """
    return [run["evaluations"][-1][1] for run in load(setting)]


def counts(run: dict[str, Any]) -> tuple[int, int, int]:
    """Count what the trace rule did in a run.

    Args:
        run: raw data.

    Returns:
        Refreshes (layers taking new factors), layers that were due and measured, layers that stopped.
    """
    decisions = [decision for _, _, decision, _, _ in run["refreshes"]]
    return decisions.count("update"), len(decisions), decisions.count("stop")


def table() -> str:
    """Return the result as Markdown and write it with the figures as JSON.

    Returns:
        The table.
    """
    baseline = finals(BASELINE)
    mean, deviation = statistics.fmean(baseline), statistics.stdev(baseline)
    possible = statistics.fmean(counts(run)[1] for run in load(BASELINE))  # there no layer stops: all are always due
    lines = [
        "| setting | refreshes done of possible, mean | share saved | statistics gathered, share of possible | layers "
        "stopped (each seed) | final accuracy, mean ± standard deviation (each seed) | within one standard deviation |",
        "|---|---|---|---|---|---|---|",
    ]
    figures = {}
    for setting in SETTINGS:
        each = [counts(run) for run in load(setting)]
        done = statistics.fmean(count[0] for count in each)
        measured = statistics.fmean(count[1] for count in each)
        stopped = ", ".join(str(count[2]) for count in each)
        top1 = finals(setting)
        each_final = ", ".join(f"{f:.4f}" for f in top1)
        kept = "-" if setting == BASELINE else "yes" if statistics.fmean(top1) >= mean - deviation else "no"
        lines.append(
            f"| {setting} | {done:.0f} of {possible:.0f} | {1 - done / possible:.0%} | {measured / possible:.0%} | "
            f"{stopped} | {statistics.fmean(top1):.4f} ± {statistics.stdev(top1):.4f} ({each_final}) | {kept} |"
        )
        figures[setting] = {
            "refreshes": [c[0] for c in each],
            "measured": [c[1] for c in each],
            "stopped": [c[2] for c in each],
            "possible": possible,
            "final": top1,
        }
    text = "\n".join(lines)
    (RESULTS / "table.md").write_text(text + "\n")
    (RESULTS / "table.json").write_text(json.dumps(figures, indent=1) + "\n")
    return text


def draw(setting: str, seed: int, path: Path) -> None:
    """Draw what a run refreshed, as ``torch-thor train`` does.

    Args:
        setting: its name.
        seed: seed.
        path: a PNG file.
    """
    from torch_thor.training.engine.history import History as Record
    from torch_thor.training.engine.history import RefreshPoint, StepPoint
    from torch_thor.training.reports.refresh_plot import draw_refreshes

    run = json.loads(run_file(setting, seed).read_text())
    layers = run["layers"]
    points = [RefreshPoint(step, layers[i], decision, *rest) for step, i, decision, *rest in run["refreshes"]]
    steps = [StepPoint(i, loss, 0.0, 0.0, 0.0, refresh=False) for i, loss in enumerate(run["loss"], start=1)]
    draw_refreshes(Record(steps, refreshes=points), layers, path)


def main() -> None:
    """Run what is missing, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table from the raw data")
    parser.add_argument("--plot", type=Path, default=PICTURE, help="where the picture goes")
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "SEED"), help="train once (used by this script)")
    options = parser.parse_args()
    if options.one:
        train_one(options.one[0], int(options.one[1]))
        return
    if not options.table:
        complete()
    print(table())
    draw(*DRAWN, options.plot)


if __name__ == "__main__":
    main()
