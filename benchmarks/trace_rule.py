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

import itertools
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_thor.bench import Folder, markdown, script, write_tables
from torch_thor.bench.stores import finite
from torch_thor.files import whole_file

STORE = Folder(Path(__file__).parent / "results" / "trace_rule")
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "refreshes.png"
BASELINE = "thor_nt"
SETTINGS = ("thor", "thor_stop", "thor_nt")  # as THOR.preset names them
SEEDS = (0, 1, 2)
COLOURS = {"update": "#0072b2", "keep": "#d3e4f2", "stop": "#bbbbbb", "failed": "#d55e00"}  # colour-blind safe
MEANING = {
    "update": "new factors taken",
    "keep": "old factors kept",
    "stop": "stopped permanently",
    "failed": "not invertible",
}
MOST_IN_LEGEND = 16  # with more layers, the legend would be too long


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
        """Train."""
        from torch_thor.bench import train_recipe

        words = [f"trace_thresholds={self.setting}", f"seed={self.seed}", "eval_interval=156", "device=cpu"]
        run, record, values = train_recipe("fashion-mnist", "thor", words)
        if values["failure"]:
            raise RuntimeError(values["failure"])
        layers = list(run.optimizer.curvature)
        # step (from 1), layer (place in the list), decision, Δ, tr(F + λI)
        refreshes = [
            [point.step, layers.index(event.layer), event.decision.value, event.trace_change, event.trace]
            for point in record.points
            for event in point.events
        ]
        return {**asdict(self), **values, "layers": layers, "refreshes": finite(refreshes)}


DRAWN = Training("thor_stop", 1)


def trainings(*settings: str) -> list[Training]:
    """List the runs."""
    return [Training(setting, seed) for setting in settings or SETTINGS for seed in SEEDS]


def load(setting: str) -> list[dict[str, Any]]:
    """Return a setting's raw data."""
    return [STORE.read(run.key) for run in trainings(setting)]


def finals(setting: str) -> list[float]:
    """Return a setting's final accuracies."""
    return [run["evaluations"][-1][1] for run in load(setting)]


def counts(run: dict[str, Any]) -> tuple[int, int, int]:
    """Count what the trace rule did in a run."""
    decisions = [decision for _, _, decision, _, _ in run["refreshes"]]
    return decisions.count("update"), len(decisions), decisions.count("stop")


def table() -> str:
    """Return the result as Markdown and write it with the figures as JSON."""
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
    """Draw a row of a run's decisions for each layer, and below them the trace of each layer over time."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    run = STORE.read(training.key)
    layers, end = run["layers"], len(run["loss"]) + 1
    height = 0.8 + 0.25 * len(layers)
    figure = Figure(figsize=(10, height + 3.6), layout="constrained")
    rows, traces = figure.subplots(2, 1, sharex=True, height_ratios=[height, 3.4])
    for place, layer in enumerate(layers):
        steps, _, decisions, _, values = zip(*(one for one in run["refreshes"] if one[1] == place), strict=True)
        spans = [(step, following - step) for step, following in itertools.pairwise([*steps, end])]
        rows.broken_barh(spans, (place - 0.4, 0.8), facecolors=[COLOURS[one] for one in decisions], linewidth=0)
        colour = colormaps["viridis"](place / max(1, len(layers) - 1))
        traces.plot(steps, values, color=colour, marker=".", ms=3, lw=1, label=layer)
    rows.set_yticks(range(len(layers)), layers, fontsize=8)
    rows.set(ylim=(len(layers) - 0.5, -0.5), title="Decision of each refresh, until the next one", ylabel="layer")
    seen = {decision for _, _, decision, _, _ in run["refreshes"]}
    handles = [Patch(color=COLOURS[decision], label=text) for decision, text in MEANING.items() if decision in seen]
    rows.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, fontsize=8, frameon=False)
    traces.set(xlabel="step", ylabel="tr(F + λI), new statistics", yscale="log")
    traces.grid(alpha=0.3)
    if len(layers) <= MOST_IN_LEGEND:
        traces.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=100)


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
