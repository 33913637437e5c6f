"""Tables and pictures of suite.py, from its raw data."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from benchmarks.optimizers import CLASSES, PEERS, own_setting
from benchmarks.runner.drawing import legend_below, marker, save
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import mean_curve, steps_to
from benchmarks.runner.stores import key_of
from benchmarks.suite_problems import PROBLEMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        same: The peers' settings for all problems, by title; empty while runs are missing.
    """

    problem: str
    rows: Mapping[str, Any]
    chosen: Mapping[str, Row]
    same: Mapping[str, Row]

    def runs(self, setting: Row) -> list[Row]:
        """Return a setting's runs with the seeds that count, without those that diverged."""
        own = {"task": self.problem, **setting}
        found = [self.rows.get(key_of({**own, "seed": seed})) for seed in range(10)]
        return [row for row in found if row is not None and row["value"] is not None]

    def all_ran(self) -> bool:
        """Return whether each peer ran with its setting for all problems."""
        jobs = [
            {"task": self.problem, **setting, "seed": seed}
            for setting in self.same.values()
            for seed in range(3)
        ]
        return bool(jobs) and all(key_of(job) in self.rows for job in jobs)

    def values(self, setting: Row) -> list[float]:
        """Return the final figures of a setting; none if a seed diverged, or was not run."""
        found = [row["value"] for row in self.runs(setting)]
        return found if len(found) >= 3 else []

    def error(self, setting: Row) -> float:
        """Return the mean figure in a form in which lower is better: a loss, or 1 - accuracy."""
        found = self.values(setting)
        if not found:
            return float("inf")
        mean = statistics.fmean(found)
        return 1 - mean if PROBLEMS[self.problem].higher else mean

    @cached_property
    def rival(self) -> str:
        """The peer with the best figure, tuned."""
        tuned = [name for name in PEERS if name in self.chosen]
        return min(tuned, key=lambda name: self.error(self.chosen[name]))

    @cached_property
    def times(self) -> Row:
        """Milliseconds of the steps, and bytes of state per parameter; empty if not measured."""
        alone = [row for row in self.rows.values() if row["job"].get("alone")]
        return next((row for row in alone[::-1] if row["job"]["task"] == self.problem), {})

    def spent(self, name: str) -> list[float]:
        """Return the seconds of training up to each evaluation; none if no step was timed."""
        measured = self.times.get("milliseconds", {})
        if name not in measured:
            return []
        own = statistics.median(measured[name])
        refresh = statistics.median(measured.get(f"{name} refresh", [own]))
        run, seconds = self.runs(self.setting(name))[0], list[float]()
        for step, _, *so_far in run["curve"]:
            # of THOR only the sum was recorded; its refreshes are evenly distributed
            evenly = run.get("refreshes", 0) * step / PROBLEMS[self.problem].steps
            refreshes = so_far[0] if so_far else evenly
            seconds.append((own * (step - refreshes) + refresh * refreshes) / 1000)
        return seconds

    def milliseconds(self, name: str) -> float | None:
        """Return the mean time of a step in a run, with its refreshes."""
        spent = self.spent(name)
        return 1000 * spent[-1] / PROBLEMS[self.problem].steps if spent else None

    def setting(self, name: str) -> Row:
        """Return the setting that is shown: ThorMuon's own, the best trial of others."""
        return own_setting(self.problem) if name == "thor-muon" else self.chosen[name]

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return steps and mean held-out figures."""
        return mean_curve([row["curve"] for row in self.runs(self.setting(name))])

    def steps(self, name: str | None = None, own: str = "thor-muon") -> float | None:
        """Return the share of the steps after which one of ours is where another ends.

        The other is the rival unless it is named; the result is None if ours never gets there.
        """
        problem = PROBLEMS[self.problem]
        goal = statistics.fmean(self.values(self.chosen[name or self.rival]))
        needed = steps_to(self.curve(own), goal, higher=problem.higher)
        return None if needed is None else needed / problem.steps

    def seconds(self, name: str | None = None) -> float | None:
        """Return the share of another's time after which ThorMuon is where it ends."""
        share, own = self.steps(name), self.spent("thor-muon")
        other = self.spent(name or self.rival)
        if share is None or not own or not other:
            return None
        steps = [step for step, _ in self.curve("thor-muon")]
        there = share * PROBLEMS[self.problem].steps
        return float(numpy.interp(there, [0, *steps], [0, *own])) / other[-1]

    def shown(self, setting: Row | None) -> str:
        """Format the mean and the standard error of a setting."""
        values = self.values(setting) if setting is not None else []
        return with_error(values) if values else ""


def contests(
    rows: Mapping[str, Any], chosen: Mapping[tuple[str, str], Row], same: Mapping[str, Row]
) -> list[Contest]:
    """Return the problems whose runs are there."""
    found = []
    for problem in PROBLEMS:
        own = {name: setting for (its, name), setting in chosen.items() if its == problem}
        contest = Contest(problem, rows, own, same)
        if (
            set(PEERS) <= set(own)
            and contest.values(own_setting(problem))
            and all(contest.runs(own[name]) for name in PEERS)
        ):
            found.append(contest)
    return found


# ---- tables --------------------------------------------------------------------------------------


def tables(found: list[Contest]) -> str:
    """Return the tables: tuned peers, one setting for all, the profile, batch sizes, costs."""
    parts = {"Each other optimizer tuned for each problem, ThorMuon with one setting": tuned}
    if found and all(contest.all_ran() for contest in found):
        parts |= {"One setting for all problems": one_setting, "Performance profile": profile}
    parts |= {
        "Steps of ThorMuon, and of THOR where it was tuned, to where each tuned one ends": shares,
        "All tuned optimizers": every,
        "Learning rates that are best": rates,
        "What a step costs": costs,
    }
    return "\n\n".join(f"### {title}\n\n{made(found)}" for title, made in parts.items())


def by_problem(names: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table with a column for each of these optimizers."""
    return markdown(["problem", *(NAMES[name] for name in names)], lines)


def tuned(found: list[Contest]) -> str:
    """Return the contests with the best tuned peer."""
    heads = ["problem", "figure", "best tuned", "its"]
    heads += ["ThorMuon", "steps", "seconds", "tuned ThorMuon"]
    lines = []
    for contest in found:
        problem, rival = PROBLEMS[contest.problem], contest.rival
        cells = [problem.title, problem.metric, NAMES[rival], contest.shown(contest.chosen[rival])]
        cells += [contest.shown(contest.setting("thor-muon")), ratio(contest.steps())]
        cells += [ratio(contest.seconds()), contest.shown(contest.chosen.get("thor-muon"))]
        lines.append(cells)
    return markdown(heads, lines)


def every(found: list[Contest]) -> str:
    """Return the figures of all tuned optimizers."""
    lines = [
        [contest.problem, *(contest.shown(contest.chosen.get(name)) for name in NAMES)]
        for contest in found
    ]
    return by_problem(NAMES, lines)


def rates(found: list[Contest]) -> str:
    """Return the learning rates that were chosen."""
    names = [*PEERS, "thor-muon"]
    lines = [
        [contest.problem, *(f"{contest.chosen[name]['lr']:g}" for name in names)]
        for contest in found
        if contest.chosen.keys() >= set(names)
    ]
    return by_problem(names, lines)


def shares(found: list[Contest]) -> str:
    """Return the share of the steps that ours need to where each other ends."""
    lines = []
    for contest in found:
        for own in CLASSES:
            if own in contest.chosen:
                title = "" if own == "thor-muon" else f": {NAMES[own]}"
                reached = [
                    ratio(contest.steps(name, own)) if contest.values(contest.chosen[name]) else ""
                    for name in PEERS
                ]
                lines.append([contest.problem + title, *reached])
    return by_problem(PEERS, lines)


def one_setting(found: list[Contest]) -> str:
    """Return the figures with the learning rate of each optimizer that serves all problems best."""
    peers = found[0].same
    heads = [f"{title} ({setting['lr']:g})" for title, setting in peers.items()]
    lines = []
    for contest in found:
        settings = [*peers.values(), contest.setting("thor-muon")]
        best = min(settings, key=contest.error)
        cells = [contest.shown(setting) or "diverged" for setting in settings]
        cells[settings.index(best)] = f"**{contest.shown(best)}**"
        lines.append([contest.problem, *cells])
    return markdown(["problem", *heads, "ThorMuon"], lines)


def profile(found: list[Contest]) -> str:
    """Return the share of problems on which an optimizer's error is within a ratio of the best.

    This is the performance profile of Dolan and Moré (2002).
    """
    errors: dict[str, list[float]] = {}
    for contest in found:
        settings = {f"{title}, one setting": own for title, own in contest.same.items()}
        settings |= {f"{NAMES[name]}, tuned": contest.chosen[name] for name in PEERS}
        settings["ThorMuon, one setting"] = contest.setting("thor-muon")
        own = {label: contest.error(setting) for label, setting in settings.items()}
        for label, error in own.items():
            errors.setdefault(label, []).append(error / min(own.values()))
    within = {
        label: [sum(value <= most for value in values) / len(values) for most in RATIOS]
        for label, values in errors.items()
    }
    lines = [
        [label, *(f"{share:.0%}" for share in own)]
        for label, own in sorted(within.items(), key=lambda item: -sum(item[1]))
    ]
    return markdown(["optimizer", *(f"≤ {most:g}" for most in RATIOS)], lines)


def costs(found: list[Contest]) -> str:
    """Return milliseconds of a step over SGD's, and bytes of state a parameter."""
    names, lines = [name for name in [*PEERS, "thor-muon"] if name != "sgd"], []
    for contest in found:
        sgd = contest.milliseconds("sgd")
        if sgd:
            state = contest.times["state_bytes"]
            own = {name: (contest.milliseconds(name) or 0.0) / sgd for name in names}
            cells = [f"{own[name]:.2f} ({state[name]:.0f})" for name in names]
            lines.append([contest.problem, f"{sgd:.1f} ms", *cells])
    return by_problem(["sgd", *names], lines)


def ratio(value: float | None) -> str:
    """Format a ratio."""
    return "not reached" if value is None else f"{value:.2f}"


# ---- picture -------------------------------------------------------------------------------------


def picture(found: list[Contest]) -> None:
    """Draw held-out figures against seconds."""
    from matplotlib.figure import Figure

    by_name = {contest.problem: contest for contest in found if contest.times}
    if not by_name.keys() >= set(PANELS):
        return
    figure = Figure(figsize=(4 * len(PANELS), 3.8), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for name, panel in zip(PANELS, axes, strict=True):
        curves(panel, by_name[name])
    legend_below(figure, axes)
    save(figure, PICTURES / "suite.png")


def curves(panel: "Axes", contest: Contest) -> None:
    """Draw one problem: mean over seeds, against the time of the steps."""
    problem, ends, last = PROBLEMS[contest.problem], list[float](), 0.0
    thor = ["thor"] if contest.problem.startswith("resnet") else []
    for name in [*PEERS, *thor, "thor-muon"]:
        spent = contest.spent(name)
        steps, values = zip(*contest.curve(name), strict=True)
        ours = name == "thor-muon"
        panel.plot(
            spent,
            values,
            color=COLOURS[name],
            marker=marker(steps),
            label=f"{NAMES[name]}, {'one setting' if ours else 'tuned'}",
            linewidth=2.4 if ours else 1.2,
        )
        last = 1.3 * spent[-1]
        ends += values[4:] if name != "thor" else ()
    title = problem.title.split(" on ")[0].split(" that ")[0]
    panel.set_title(f"{title}, batch {problem.batch}", fontsize=10)
    panel.ticklabel_format(style="plain", useOffset=False)
    panel.set(xlabel="seconds", xlim=(0, last), ylabel=problem.metric)
    ends.sort()
    margin = 0.05 * (ends[-1] - ends[0])
    if problem.higher:
        panel.set_ylim(ends[int(0.1 * len(ends))], ends[-1] + margin)
    else:
        panel.set_ylim(ends[0] - margin, ends[int(0.9 * len(ends))])
