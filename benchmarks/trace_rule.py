"""Savings and cost of the trace rule: Fashion-MNIST, small ResNet, the paper's three settings.

    python benchmarks/trace_rule.py                # runs what is missing in results/trace_rule, then table and picture
    python benchmarks/trace_rule.py --table        # makes the table and the picture from the raw data only

Protocol. The recipe ``fashion-mnist`` is used unchanged (lr 0.05, damping 0.03, a refresh step every 20 steps,
2 epochs), with ``trace_thresholds`` of THOR, THOR_stop and THOR_NT and seeds 0, 1 and 2. A seed determines the initial
weights and the order of the data, which are the same for every setting. One refresh means that one layer takes and
inverts new factors, so the number of possible refreshes is the number of layers times the number of refresh steps. The
accuracy of a setting counts as kept if its mean over the seeds is at most one standard deviation of THOR_NT's
(of the sample, n - 1) below the mean of THOR_NT.

The benchmark does not test the rule on the network for which the paper chose its thresholds.
"""

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_thor.bench import Folder, markdown, script, write_tables

STORE = Folder(Path(__file__).parent / "results" / "trace_rule")
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "refreshes.png"
BASELINE = "thor_nt"
SETTINGS = ("thor", "thor_stop", "thor_nt")  # as THOR.preset names them
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Training:
    """One run.

    Args:
        setting: one of ``SETTINGS``.
        seed: seed.
    """

    setting: str
    seed: int

    @property
    def key(self) -> str:
        """Name of its raw data."""
        return f"{self.setting}-seed{self.seed}"

    def run(self) -> dict[str, Any]:
        """Train.

        Returns:
            The raw data.

        Raises:
            RuntimeError: the training diverged, so that its refreshes say nothing.
        """
        from torch_thor.bench import train_recipe

        words = [f"trace_thresholds={self.setting}", f"seed={self.seed}", "eval_interval=156", "device=cpu"]
        run, values = train_recipe("fashion-mnist", "thor", words)
        if values["failure"]:
            raise RuntimeError(values["failure"])
        layers = list(run.optimizer.curvature)
        # step (from 1), layer (place in the list), decision, Δ, tr(F + λI)
        refreshes = [[p.step, layers.index(p.layer), p.decision, p.trace_change, p.trace] for p in run.record.refreshes]
        return {**asdict(self), **values, "layers": layers, "refreshes": refreshes}


DRAWN = Training("thor_stop", 1)


def trainings(*settings: str) -> list[Training]:
    """List the runs.

    Args:
        *settings: of ``SETTINGS``; all, if none is named.

    Returns:
        A run for each seed.
    """
    return [Training(setting, seed) for setting in settings or SETTINGS for seed in SEEDS]


def load(setting: str) -> list[dict[str, Any]]:
    """Return a setting's raw data.

    Args:
        setting: its name.

    Returns:
        Those of each seed.
    """
    return [STORE.read(run.key) for run in trainings(setting)]


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
    heads = (
        "setting",
        "refreshes done of possible, mean",
        "share saved",
        "statistics gathered, share of possible",
        "layers stopped (each seed)",
        "final accuracy, mean ± standard deviation (each seed)",
        "within one standard deviation",
    )
    rows, figures = [], {}
    for setting in SETTINGS:
        refreshed, measured, stopped = zip(*(counts(run) for run in load(setting)), strict=True)
        done, top1 = statistics.fmean(refreshed), finals(setting)
        kept = "-" if setting == BASELINE else "yes" if statistics.fmean(top1) >= mean - deviation else "no"
        rows.append(
            (
                setting,
                f"{done:.0f} of {possible:.0f}",
                f"{1 - done / possible:.0%}",
                f"{statistics.fmean(measured) / possible:.0%}",
                markdown.each(stopped, "d"),
                markdown.summary(top1, ".4f"),
                kept,
            )
        )
        figures[setting] = {
            "refreshes": refreshed,
            "measured": measured,
            "stopped": stopped,
            "possible": possible,
            "final": top1,
        }
    text = markdown.table(heads, rows)
    write_tables(STORE.folder, text, figures)
    return text


def draw(training: Training, path: Path) -> None:
    """Draw what a run refreshed, as ``torch-thor train`` does.

    Args:
        training: the run.
        path: a PNG file.
    """
    from torch_thor.training import History as Record
    from torch_thor.training import RefreshPoint, StepPoint
    from torch_thor.training.reports import draw_refreshes

    run = STORE.read(training.key)
    layers = run["layers"]
    points = [RefreshPoint(step, layers[i], decision, *rest) for step, i, decision, *rest in run["refreshes"]]
    steps = [StepPoint(i, loss, 0.0, 0.0, 0.0, refresh=False) for i, loss in enumerate(run["loss"], start=1)]
    draw_refreshes(Record(steps, refreshes=points), layers, path)


def main() -> None:
    """Run what is missing, print the table and draw the picture."""
    parser = script.parser(__doc__, workers=1)  # the raw data hold seconds
    parser.add_argument("--plot", type=Path, default=PICTURE, help="where the picture goes")
    options = parser.parse_args()
    if not options.table:
        script.measure(STORE, [trainings], options.workers)
    print(table())
    draw(DRAWN, options.plot)


if __name__ == "__main__":
    main()
