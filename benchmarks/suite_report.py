"""Tables and pictures of suite.py, from its raw data."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.optimizers import CLASSES, PEERS, own_setting
from benchmarks.runner.drawing import label_in_full, legend_below, marker
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import steps_to
from benchmarks.runner.stores import key_of
from benchmarks.suite_problems import PROBLEMS
from torch_thor.files import whole_file

PICTURES = Path("docs/images")
NAMES = {
    "sgd": "SGD", "adamw": "AdamW", "muon": "Muon", "soap": "SOAP", "kron": "PSGD-Kron",
    "schedule-free": "schedule-free AdamW", "thor-muon": "ThorMuon", "thor": "THOR",
    "thor-paper": "THOR, unbounded",
}  # fmt: skip
# distinguishable with colour vision deficiency (Okabe and Ito); ours are blue and green
COLOURS = {
    "sgd": "#666666", "adamw": "#e69f00", "muon": "#d55e00", "soap": "#cc79a7", "kron": "#56b4e9",
    "schedule-free": "#f0e442", "thor-muon": "#0072b2", "thor": "#009e73",
}  # fmt: skip
PANELS = ("autoencoder", "characters", "resnet1024", "bert512")
README = {  # those that chose no default, with shorter titles for its narrower table
    "bert512": "BERT (2 layers of 64), batch 512: loss ↓",
    "bert32": "the same, batch 32: loss ↓",
    "pinn": "physics-informed network (3 layers of 64): error ↓",
}
RATIOS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)  # of the performance profile
Row = dict[str, Any]


@dataclass
class Contest:
    """The results on one problem.

    Args:
        problem: Its name.
        rows: All results, by key.
        chosen: The best tuned setting of each optimizer, by name, as far as its runs are there.
        rates: The one learning rate of each peer for all problems; empty while runs are missing.
    """

    problem: str
    rows: Mapping[str, Any]
    chosen: Mapping[str, Row]
    rates: Mapping[str, float]

    def runs(self, setting: Mapping[str, Any]) -> list[Row]:
        """Return a setting's runs with the seeds that count, without those that diverged."""
        own = {"task": self.problem, **setting}
        found = [self.rows.get(key_of({**own, "seed": seed})) for seed in range(10)]
        return [row for row in found if row is not None and row["value"] is not None]

    def all_ran(self) -> bool:
        """Return whether each peer ran with its one learning rate for all problems."""
        settings = [
            {"task": self.problem, "optimizer": name, "lr": lr} for name, lr in self.rates.items()
        ]
        return all(
            key_of({**own, "seed": seed}) in self.rows for own in settings for seed in range(3)
        )

    def values(self, setting: Mapping[str, Any]) -> list[float]:
        """Return the final figures of a setting.

        There are none if the setting diverged with a seed, or was not run.
        """
        found = [row["value"] for row in self.runs(setting)]
        return found if len(found) >= 3 else []

    def error(self, setting: Mapping[str, Any]) -> float:
        """Return the mean figure in a form in which lower is better: a loss, or 1 - accuracy."""
        found = self.values(setting)
        if not found:
            return float("inf")
        return (
            1 - statistics.fmean(found)
            if PROBLEMS[self.problem].higher
            else statistics.fmean(found)
        )

    @cached_property
    def rival(self) -> str:
        """The peer with the best figure, tuned."""
        return min(
            (name for name in PEERS if name in self.chosen),
            key=lambda name: self.error(self.chosen[name]),
        )

    @cached_property
    def times(self) -> Row:
        """Milliseconds of the steps, and bytes of state per parameter; empty if not measured."""
        mine = [
            row
            for row in self.rows.values()
            if row["job"].get("alone") and row["job"]["task"] == self.problem
        ]
        return mine[-1] if mine else {}

    def milliseconds(self, name: str) -> float | None:
        """Return the mean time of a step in a run, with its share of refreshes."""
        measured = self.times.get("milliseconds", {})
        if name not in measured:
            return None
        known = {
            key: statistics.median(value) if isinstance(value, list) else float(value)
            for key, value in measured.items()
        }
        refresh = known.get(f"{name} refresh", known[name])
        runs = self.runs(self.setting(name))
        taken = [run.get("refreshes") or run["curve"][-1][-1] for run in runs if name in CLASSES]
        share = statistics.fmean(taken or [0]) / PROBLEMS[self.problem].steps
        return known[name] + share * (refresh - known[name])

    def setting(self, name: str) -> Mapping[str, Any]:
        """Return the setting that is shown: ThorMuon's only one, the tuned one of others."""
        return own_setting(self.problem) if name == "thor-muon" else self.chosen[name]

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return steps and mean held-out figures."""
        runs = [row["curve"] for row in self.runs(self.setting(name))]
        return [
            (points[0][0], statistics.fmean(point[1] for point in points))
            for points in zip(*runs, strict=True)
        ]

    def steps(self, name: str | None = None, own: str = "thor-muon") -> float | None:
        """Return the share of the steps after which one of ours is where another ends.

        The other is the rival unless it is named; the result is None if ours never gets there.
        """
        higher = PROBLEMS[self.problem].higher
        goal = statistics.fmean(self.values(self.chosen[name or self.rival]))
        needed = steps_to(self.curve(own), goal, higher=higher)
        return None if needed is None else needed / PROBLEMS[self.problem].steps

    def relative(self, name: str) -> float | None:
        """Return the time of ThorMuon's step over another's."""
        own, other = self.milliseconds("thor-muon"), self.milliseconds(name)
        return None if own is None or other is None else own / other

    def seconds(self) -> float | None:
        """Return the share of the rival's time after which ThorMuon is where the rival ends."""
        share, ratio = self.steps(), self.relative(self.rival)
        return None if share is None or ratio is None else share * ratio


def contests(
    rows: Mapping[str, Any], chosen: Mapping[tuple[str, str], Row], rates: Mapping[str, float]
) -> list[Contest]:
    """Return the problems whose runs are there."""
    found = []
    for problem in PROBLEMS:
        own = {name: setting for (its, name), setting in chosen.items() if its == problem}
        contest = Contest(problem, rows, own, rates)
        if (
            set(PEERS) <= set(own)
            and contest.values(own_setting(contest.problem))
            and all(contest.runs(own[name]) for name in PEERS)
        ):
            found.append(contest)
    return found


def tables(found: list[Contest]) -> str:
    """Return the tables: tuned peers, one setting for all, the profile, batch sizes, costs."""
    parts = [
        "### Each other optimizer tuned for each problem, ThorMuon with one setting",
        tuned(found),
    ]
    if found and all(contest.rates and contest.all_ran() for contest in found):
        parts += [
            "### One setting for all problems",
            one_setting(found),
            "### Performance profile",
            profile(found),
        ]
    parts += [
        "### Steps of ThorMuon, and of THOR where it was tuned, to where each tuned one ends",
        shares(found),
    ]
    parts += [
        "### All tuned optimizers",
        every(found),
        "### Learning rates that are best",
        rates(found),
    ]
    parts += ["### What a step costs", costs(found)]
    return "\n\n".join(parts)


def tuned(found: list[Contest]) -> str:
    """Return the contests with the best tuned peer."""
    heads = [
        "problem",
        "figure",
        "best tuned",
        "its",
        "ThorMuon",
        "steps",
        "seconds",
        "tuned ThorMuon",
    ]
    rows = []
    for contest in found:
        best = contest.chosen.get("thor-muon")
        cells = [
            PROBLEMS[contest.problem].title,
            PROBLEMS[contest.problem].metric,
            NAMES[contest.rival],
            shown(contest, contest.chosen[contest.rival]),
        ]
        cells += [
            shown(contest, own_setting(contest.problem)),
            ratio(contest.steps()),
            ratio(contest.seconds()),
            shown(contest, best) if best else "",
        ]
        rows.append(cells)
    return markdown(heads, rows)


def every(found: list[Contest]) -> str:
    """Return the figures of all tuned optimizers."""
    names = [*PEERS, "thor-muon", "thor", "thor-paper"]
    return markdown(
        ["problem", *(NAMES[name] for name in names)],
        [
            [
                contest.problem,
                *(
                    shown(contest, contest.chosen[name]) if name in contest.chosen else ""
                    for name in names
                ),
            ]
            for contest in found
        ],
    )


def rates(found: list[Contest]) -> str:
    """Return the learning rates that were chosen."""
    names = [*PEERS, "thor-muon"]
    lines = [
        [
            contest.problem,
            *(f"{contest.chosen[name]['lr']:g}" for name in names if name in contest.chosen),
        ]
        for contest in found
    ]
    return markdown(
        ["problem", *(NAMES[name] for name in names)],
        [line for line in lines if len(line) > len(names)],
    )


def shares(found: list[Contest]) -> str:
    """Return the share of the steps that ours need to where each other ends.

    From batch to batch it falls.
    """
    return markdown(
        ["problem", *(NAMES[name] for name in PEERS)],
        [
            [
                contest.problem if own == "thor-muon" else f"{contest.problem}: {NAMES[own]}",
                *(
                    ratio(contest.steps(name, own)) if contest.values(contest.chosen[name]) else ""
                    for name in PEERS
                ),
            ]
            for contest in found
            for own in ("thor-muon", "thor", "thor-paper")
            if own in contest.chosen
        ],
    )


def one_setting(found: list[Contest]) -> str:
    """Return the figures with the learning rate of each optimizer that serves all problems best."""
    peers = {name: {"optimizer": name, "lr": lr} for name, lr in found[0].rates.items()}
    heads = [f"{NAMES[name]} ({setting['lr']:g})" for name, setting in peers.items()]
    rows = []
    for contest in found:
        settings = {**peers, "thor-muon": own_setting(contest.problem)}
        best = min(settings, key=lambda name: contest.error(settings[name]))
        cells = {name: shown(contest, own) or "diverged" for name, own in settings.items()}
        shown_cells = (f"**{cell}**" if name == best else cell for name, cell in cells.items())
        rows.append([contest.problem, *shown_cells])
    return markdown(["problem", *heads, "ThorMuon"], rows)


def profile(found: list[Contest]) -> str:
    """Return the share of problems on which an optimizer's error is within a ratio of the best."""
    shares = profiles(found)
    heads = ["optimizer", *(f"≤ {ratio:g}" for ratio in RATIOS)]
    return markdown(
        heads, [[label, *(f"{share:.0%}" for share in own)] for label, own in shares.items()]
    )


def profiles(found: list[Contest]) -> dict[str, list[float]]:
    """Return the lines of the performance profile (Dolan and Moré 2002)."""
    lines: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for contest in found:
        settings = {
            f"{NAMES[name]}, one setting": {"optimizer": name, "lr": lr}
            for name, lr in contest.rates.items()
        }
        settings |= {f"{NAMES[name]}, tuned": contest.chosen[name] for name in PEERS}
        settings["ThorMuon, one setting"] = own_setting(contest.problem)
        own = {label: contest.error(setting) for label, setting in settings.items()}
        least = min(own.values())
        for label, error in own.items():
            errors.setdefault(label, []).append(error / least)
    for label, values in errors.items():
        lines[label] = [sum(value <= most for value in values) / len(values) for most in RATIOS]
    return dict(sorted(lines.items(), key=lambda item: -sum(item[1])))


def costs(found: list[Contest]) -> str:
    """Return milliseconds of a step over SGD's, and bytes of state a parameter."""
    names = [name for name in [*PEERS, "thor-muon"] if name != "sgd"]
    rows = []
    for contest in (each for each in found if each.times):
        sgd, state = contest.milliseconds("sgd") or 1.0, contest.times["state_bytes"]
        cells = [
            f"{(contest.milliseconds(name) or 0) / sgd:.2f} ({state[name]:.0f})" for name in names
        ]
        rows.append([contest.problem, f"{sgd:.1f} ms", *cells])
    return markdown(["problem", "SGD", *(NAMES[name] for name in names)], rows)


def shown(contest: Contest, setting: Mapping[str, Any]) -> str:
    """Format the mean and the standard error of a setting."""
    values = contest.values(setting)
    return with_error(values) if values else ""


def ratio(value: float | None) -> str:
    """Format a ratio."""
    return "not reached" if value is None else f"{value:.2f}"


def picture(found: list[Contest]) -> None:
    """Draw held-out figures against seconds."""
    by_name = {contest.problem: contest for contest in found}
    problems = [by_name[name] for name in PANELS if name in by_name and by_name[name].times]
    if not problems:
        return
    figure, axes = pyplot.subplots(
        1, len(problems), figsize=(4 * len(problems), 3.8), squeeze=False, layout="constrained"
    )
    for contest, panel in zip(problems, axes[0], strict=True):
        curves(panel, contest)
    legend_below(figure, axes[0])
    with whole_file(PICTURES / "suite.png") as temporary:
        figure.savefig(temporary, dpi=110)
    pyplot.close(figure)


def curves(panel: Axes, contest: Contest) -> None:
    """Draw one problem: mean over seeds, against the time of the steps."""
    problem = PROBLEMS[contest.problem]
    for name in [*PEERS, *(["thor"] if contest.problem.startswith("resnet") else []), "thor-muon"]:
        cost = contest.milliseconds(name)
        if name in COLOURS and cost is not None:
            steps, values = zip(*contest.curve(name), strict=True)
            label = f"{NAMES[name]}, {'one setting' if name == 'thor-muon' else 'tuned'}"
            wide = 2.4 if name == "thor-muon" else 1.2
            panel.plot(
                [step * cost / 1000 for step in steps],
                values,
                color=COLOURS[name],
                marker=marker(steps),
                label=label,
                linewidth=wide,
            )
    panel.set_title(
        problem.title.split(" on ")[0].split(" that ")[0] + f", batch {problem.batch}", fontsize=10
    )
    label_in_full(panel)
    panel.set_xlabel("seconds")
    panel.set_xlim(0, 1.3 * problem.steps * (contest.milliseconds("thor-muon") or 0.0) / 1000)
    panel.set_ylabel(problem.metric)
    ends = sorted(value for name in [*PEERS, "thor-muon"] for _, value in contest.curve(name)[4:])
    low, high = ends[0], ends[-1]
    panel.set_ylim(
        low - 0.05 * (high - low), ends[int(0.9 * len(ends))]
    ) if not problem.higher else panel.set_ylim(
        ends[int(0.1 * len(ends))], high + 0.05 * (high - low)
    )
