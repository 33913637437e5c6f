"""ThorMuon without a learning rate against AdamW, where a trained network adapts to other data.

    python -m benchmarks finetuning           # runs what is missing, then tables and picture
    python -m benchmarks finetuning --table

The problems are those of finetuning_problems.py, the ways those of finetuning_ways.py. The learning
rate grows over the first 5 % of the steps, then falls linearly to 0. A seed that serves nothing
else and one half of the held-out data choose the learning rate of AdamW and among the ways; then
three other seeds run, and the other half of the held-out data gives the figures. Everything is
trained on one thread.
"""

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.finetuning_problems import PROBLEMS, UNSEEN
from benchmarks.finetuning_ways import WAYS, same
from benchmarks.runner.drawing import legend_below, save
from benchmarks.runner.machine import DEVICE
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import apart
from benchmarks.runner.stores import key_of
from benchmarks.suite_optimizers import as_one_matrix
from benchmarks.suite_problems import Batch, Problem
from torch_thor import THOR, ThorMuon
from torch_thor.optim import trained as trained_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHOOSING, SEEDS = (10, 11, 12), (0, 1, 2)
WARM_UP = 0.05  # of the steps
ADAMW = {False: (2e-5, 5e-5, 1e-4, 2e-4), True: (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)}  # LoRA or not
BEYOND = {False: (5e-4, 1e-3, 2e-3), True: (5e-3, 1e-2)}  # LoRA or not; more than is usual
RATE = 0.08  # ThorMuon's
THOR_RATES = ((0.005, 0.001), (0.0025, 0.0005), (0.00125, 0.00025))  # and bounds, of all parameters
SHARES = (0.1, 0.05, 0.025)  # without a rate: of all parameters but new matrices
OURS = {"optimizer": "thor-muon"}
README = ("minilm-sst2", "minilm-trec", "minilm-subj")
PICTURE = Path("docs/images/fine-tuning.png")
COLOURS = {  # of Okabe and Ito
    "AdamW, tuned": "#e69f00",
    "ThorMuon, 0.08 for all": "#999999",
    "ThorMuon, no learning rate": "#0072b2",
}
FRONT = ("AdamW, tuned", "ThorMuon, no learning rate")  # on the front page

Job = dict[str, Any]
Rows = dict[str, dict[str, Any]]


def run(job: Job) -> dict[str, Any]:
    """Train once."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problem, tuning = (PROBLEMS | UNSEEN)[job["task"]], chooses(job)
    torch.manual_seed(job["seed"])
    model = problem.model().to(DEVICE).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p]} for p in trained]
    optimizer, rate = make(model, groups, job)
    way = WAYS.get(job.get("way", "same"), same)(model, {"rate": rate, **job})
    batches, losses = problem.batches(problem.batch, job["seed"]), []
    for step in range(problem.steps):
        loss = problem.loss(model, on_device(next(batches)))
        optimizer.zero_grad()
        loss.backward()
        factors, share = way(step), share_of_lr(step, problem.steps)
        for group, parameter in zip(optimizer.param_groups, trained, strict=True):
            group["lr"] = rate * share * factors[parameter]
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return {"value": None, "failure": f"loss {losses[-1]} in step {step}"}
    found = {"loss": statistics.fmean(losses[-max(1, problem.steps // 10) :])}
    halves = (0,) if tuning else (0, 1)
    return found | {
        "value" if half == halves[-1] else "chosen": figure(problem, model, half) for half in halves
    }


def make(
    model: nn.Module, groups: list[dict[str, Any]], job: Job
) -> tuple[torch.optim.Optimizer, float]:
    """Return the optimizer of a job, and its learning rate."""
    if job["optimizer"] == "adamw":
        return torch.optim.AdamW(groups, lr=job["lr"], weight_decay=0.01), job["lr"]
    kind = {"thor-muon": ThorMuon, "thor": THOR}[job["optimizer"]]
    rate = job.get("lr", RATE)
    own: dict[str, Any] = {"lr": rate}
    if kind is ThorMuon:
        own["row_splits"] = as_one_matrix(model)
    if "max_update_ratio" in job:
        own["max_update_ratio"] = job["max_update_ratio"]
    if "share" in job:
        trained_weights.ALL, own["lr"], rate = job["share"], None, 0.05
    if job.get("way") == "known":  # as without a learning rate, with factors to choose from
        trained_weights.LEARNED, trained_weights.UNTOLD = job["trained"], job["zero"]
        trained_weights.REST, own["lr"] = job["rest"], None
    return kind(groups, weight_decay=0.01, model=model, **own), rate


def on_device(batch: Batch) -> Batch:
    """Return a batch on the device of the network."""
    return tuple(part.to(DEVICE) for part in batch)


def share_of_lr(step: int, steps: int) -> float:
    """Return the learning rate of a step, from 0, as a share of the highest."""
    return min(1.0, (step + 1) / (WARM_UP * steps), (steps - step) / ((1 - WARM_UP) * steps))


@torch.no_grad()
def figure(problem: Problem, model: nn.Module, half: int) -> float:
    """Return the problem's figure on half of the held-out data."""
    model.eval()
    found = [problem.score(model, on_device(batch)) for batch in problem.held_out(half)]
    model.train()
    return torch.cat(found).mean().item()


def optimizers(job: Job) -> list[str]:
    """Name ours among those that a job trains with."""
    names = {"thor-muon": "ThorMuon", "thor": "THOR"}
    made_by = ["ThorMuon"] if job["task"].endswith("-thor-muon") else []
    return sorted({*made_by, *([names[job["optimizer"]]] if job["optimizer"] in names else [])})


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known."""
    found: list[Job] = []
    for problem in reversed(PROBLEMS):
        minilm = problem.startswith("minilm")
        for seed in CHOOSING if minilm else CHOOSING[:1]:
            found += [{**job, "task": problem, "seed": seed} for job in rates(problem)]
            found += [{**job, "task": problem, "seed": seed} for job in knowns(problem)]
        found += [{**job, "task": problem, "seed": CHOOSING[0]} for job in others()]
    for problem in UNSEEN:
        found += [{**job, "task": problem, "seed": CHOOSING[0]} for job in rates(problem)]
    for lr, ratio in ((0.05, 0.01), (0.005, 0.01), (5e-4, 0.01), (0.05, 1e-3)):
        job = {"optimizer": "thor", "lr": lr, "max_update_ratio": ratio}
        found.append({**job, "task": "minilm-sst2", "seed": CHOOSING[0]})
    for share in SHARES:
        job = {"optimizer": "thor", "share": share}
        found += [
            {**job, "task": task, "seed": CHOOSING[0]} for task in ("minilm-sst2", "minilm-trec")
        ]
    for lr, ratio in THOR_RATES:
        job = {"optimizer": "thor", "lr": lr, "max_update_ratio": ratio}
        found += [{**job, "task": "minilm-sst2", "seed": seed} for seed in CHOOSING]
        found.append({**job, "task": "minilm-trec", "seed": CHOOSING[0]})
    for problem in reversed(PROBLEMS | UNSEEN):
        chosen = [chosen_rate(rows, problem, within) for within in (ADAMW["lora" in problem], None)]
        best = {lr for lr in chosen if lr is not None}
        if None not in chosen:
            adamw: list[Job] = [{"optimizer": "adamw", "lr": lr} for lr in sorted(best)]
            for job in (*adamw, {**OURS, "lr": RATE}, *FINALISTS):
                found += [{**job, "task": problem, "seed": seed} for seed in SEEDS]
    return found


def rates(problem: str) -> list[Job]:
    """List AdamW with each of its learning rates."""
    lora = "lora" in problem
    return [{"optimizer": "adamw", "lr": lr} for lr in ADAMW[lora] + BEYOND[lora]]


def knowns(problem: str) -> list[Job]:
    """List what is known of the weights, with several factors."""
    if "lora" in problem:
        return [known(0.125, zero, 0.0125) for zero in (0.125, 0.25, 0.5, 1.0)]
    rests = (0.0125, 0.025, 0.05)
    return [known(trained, 0.25, rest) for trained in (0.125, 0.25) for rest in rests]


def known(trained: float, zero: float, rest: float) -> Job:
    """Return a job with what is known of the weights, as ThorMuon has it without a rate."""
    return {**OURS, "way": "known", "trained": trained, "zero": zero, "rest": rest}


def others() -> list[Job]:
    """List the other ways, and single learning rates."""
    found = [{**OURS, "lr": lr} for lr in (0.01, 0.02, 0.04, 0.08)]
    found += [{**OURS, "way": "distance", "first": first} for first in (0.01, 0.1)]
    found += [{**OURS, "way": "noise", "least": least} for least in (0.01, 0.1)]
    return [*found, {**OURS, "way": "small"}, known(1.0, 1.0, 0.0125)]


def chosen_rate(rows: Rows, problem: str, within: Sequence[float] | None) -> float | None:
    """Return AdamW's best learning rate on the seeds that choose, once all have run."""
    wanted = [job["lr"] for job in rates(problem) if within is None or job["lr"] in within]
    own = [row for row in rows.values() if row["job"]["task"] == problem and chooses(row["job"])]
    found = {
        lr: [row["value"] for row in own if row["job"].get("lr") == lr and is_adamw(row["job"])]
        for lr in wanted
    }
    if not all(found.values()):
        return None
    sign = 1 if (PROBLEMS | UNSEEN)[problem].higher else -1
    return max(wanted, key=lambda lr: sign * statistics.fmean(found[lr]))


def chooses(job: Job) -> bool:
    """Return whether a job serves to choose."""
    return job["seed"] in CHOOSING


def is_adamw(job: Job) -> bool:
    """Return whether a job is the peer's."""
    return job["optimizer"] == "adamw"


# the first is what ThorMuon does without a learning rate
FINALISTS = (known(0.125, 0.25, 0.0125), known(0.25, 0.25, 0.0125), known(0.25, 0.25, 0.05))


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of ThorMuon and of AdamW on each problem whose row README shows."""
    found: list[Job] = []
    for problem in README:
        adamw = {"optimizer": "adamw", "lr": chosen_rate(rows, problem, None)}
        found += [{**job, "task": problem, "seed": SEEDS[0]} for job in (FINALISTS[0], adamw)]
    return found


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far a value may differ on another machine: as two seeds may."""
    return apart([rows[key_of({**job, "seed": seed})]["value"] for seed in SEEDS])


def table(rows: Rows) -> str:
    """Return the figures of the finalists, and those of all ways by which they were chosen."""
    every = PROBLEMS | UNSEEN
    finals = [{**OURS, "lr": RATE}, *FINALISTS]
    heads = ["problem", "AdamW, usual rates", "AdamW, any rate", *map(name_of, finals)]
    lines = []
    for problem in every:
        wide = [chosen_rate(rows, problem, within) for within in (ADAMW["lora" in problem], None)]
        adamw = [{"optimizer": "adamw", "lr": lr} for lr in wide]
        cells = [cell(rows, problem, job, SEEDS) for job in (*adamw, *finals)]
        cells[:2] = [f"{one} ({lr:g})" for one, lr in zip(cells[:2], wide, strict=True)]
        lines.append([every[problem].title, *cells])
    ways = {
        name_of(job): job
        for problem in PROBLEMS
        for job in (*rates(problem), *knowns(problem), *others())
    }
    chosen = [
        [name, *(cell(rows, problem, job, CHOOSING) for problem in PROBLEMS)]
        for name, job in ways.items()
    ]
    settings = {setting_of(row["job"]): row["job"] for row in rows.values() if is_thor(row["job"])}
    thor = [
        [
            *setting,
            *(cell(rows, problem, job, CHOOSING) for problem in ("minilm-sst2", "minilm-trec")),
        ]
        for setting, job in sorted(settings.items(), reverse=True)
    ]
    tables = (
        markdown(heads, lines),
        markdown(["way", *PROBLEMS], chosen),
        markdown(["lr", "max_update_ratio", "SST-2", "TREC"], thor),
    )
    return "\n\n".join(tables)


def is_thor(job: Job) -> bool:
    """Whether THOR trains."""
    return bool(job["optimizer"] == "thor")


def setting_of(job: Job) -> tuple[str, str]:
    """Return THOR's learning rate and bound in words."""
    if "share" in job:
        return f"none: {job['share']:g} of 0.05", f"{job['share']:g} of 0.01"
    return f"{job['lr']:g}", f"{job['max_update_ratio']:g}"


def name_of(job: Job) -> str:
    """Return how a way is called in the tables."""
    if is_adamw(job):
        return f"AdamW {job['lr']:g}"
    way = job.get("way", "same")
    if way == "same":
        return f"all {job['lr']:g}"
    if way == "known":
        rest = f"rest {job['rest']:g}"
        return f"known: trained {job['trained']:g}, zeros {job['zero']:g}, {rest}"
    own = {k: v for k, v in job.items() if k not in ("optimizer", "way", "task", "seed")}
    return " ".join([way, *(f"{k} {v:g}" for k, v in own.items())])


def cell(rows: Rows, problem: str, job: Job, seeds: Sequence[int]) -> str:
    """Return the mean of a job over seeds, with its standard error where there are several."""
    found = [rows.get(key_of({**job, "task": problem, "seed": seed})) for seed in seeds]
    values = [row["value"] for row in found if row is not None and row["value"] is not None]
    if not values:
        return "–"
    return f"{values[0]:.4f}" if len(values) == 1 else with_error(values)


# ---- the picture ---------------------------------------------------------------------------------


def draw(rows: Rows) -> None:
    """Draw all problems: accuracies above, losses below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.4), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(9, 2))
    for panel, (name, higher) in zip(
        panels, (("held-out accuracy", True), ("held-out loss", False)), strict=True
    ):
        every = (PROBLEMS | UNSEEN).items()
        names = {key: key for key, problem in every if problem.higher is higher}
        compare(panel, rows, names, tuple(COLOURS))
        panel.set(xlabel=name)
    legend_below(figure, panels[:1])
    save(figure, PICTURE)


def compare(panel: "Axes", rows: Rows, problems: Mapping[str, str], names: Sequence[str]) -> None:
    """Draw means and standard errors on some problems, a line for each."""
    for place, problem in enumerate(problems):
        for number, name in enumerate(reversed(names)):
            job = {**setting(rows, problem, name), "task": problem}
            values = [rows[key_of({**job, "seed": seed})]["value"] for seed in SEEDS]
            error = statistics.stdev(values) / len(values) ** 0.5
            panel.errorbar(
                [statistics.fmean(values)], [place + 0.15 * number], xerr=[error],
                fmt="o", markersize=9, elinewidth=2, color=COLOURS[name],
                label=name if place == 0 else None,
            )  # fmt: skip
    panel.set_yticks(range(len(problems)), list(problems.values()))
    panel.set_ylim(len(problems) - 0.4, -0.4)  # the first is above
    panel.grid(alpha=0.3)


def setting(rows: Rows, problem: str, name: str) -> Job:
    """Return the job of a name in the picture, without its seed."""
    if name == "AdamW, tuned":
        return {"optimizer": "adamw", "lr": chosen_rate(rows, problem, None)}
    return {**OURS, "lr": RATE} if name == "ThorMuon, 0.08 for all" else FINALISTS[0]
