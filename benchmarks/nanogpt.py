"""nanoGPT's example for a CPU: ThorMuon with no option, nanoGPT's AdamW, tuned AdamW, Muon, SOAP.

    python -m benchmarks nanogpt            # runs what is missing, then tables and picture
    python -m benchmarks nanogpt --table

Network, AdamW, schedule, batches and clipping are those of karpathy/nanoGPT with the options that
its README gives for a CPU; its model.py and config/train_shakespeare_char.py are read from
build/nanogpt, and data/tinyshakespeare/input.txt of karpathy/char-rnn from build/shakespeare. The
loss is that of 50 batches of the validation text (20 there), drawn once and the same for all.

- nanoGPT's AdamW has its learning rate, 1e-3, and ThorMuon no option but the model.
- AdamW (nanoGPT's but for the learning rate), Muon and SOAP (those of the suite) have five trials
  each: three learning rates a factor of two apart, then two more beyond the end that the best is
  nearer to. Trials have a seed that serves nothing else, and choose by the validation loss.
- The schedule multiplies whatever rates an optimizer has.

Everything runs on one thread. Seconds are steps times the time of a step, which all optimizers take
in turns (a job named `alone`): the median over spans of ten rounds of the ratio to AdamW, times
AdamW's median. ThorMuon's refreshes count where they happen.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.gpu_nanogpt import Example, share
from benchmarks.runner.drawing import draw_band, save
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import apart, mean_curve, shares_until
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import RATE, seconds_at, time_optimizers
from benchmarks.runner.trials import best_of, rates_around, shown
from benchmarks.suite_optimizers import CONTENDERS
from torch_thor import ThorMuon
from torch_thor.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CODE, TEXT = Path("build/nanogpt"), Path("build/shakespeare/input.txt")
WHERE = {  # what is read from others, and where it comes from
    CODE / "model.py": "model.py of karpathy/nanoGPT",
    CODE / "train_shakespeare_char.py": "config/train_shakespeare_char.py of karpathy/nanoGPT",
    TEXT: "data/tinyshakespeare/input.txt of karpathy/char-rnn",
}
# README of nanoGPT, "I only have a macbook"
SIZES: dict[str, float] = {
    "block_size": 64,
    "batch_size": 12,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
}
SIZES |= {"max_iters": 2000, "lr_decay_iters": 2000, "dropout": 0.0}
SIZES |= {"eval_interval": 125, "eval_iters": 50}  # 250 and 20 there
TUNING_SEED, SEEDS = 10, (0, 1, 2)
TRIALS = 5
THEIRS = {"optimizer": "adamw", "lr": 1e-3}
OURS = {"optimizer": "thor-muon"}
SINGLE_PROCESS: dict[str, Any] = {"alone": True}
TUNED = {"adamw": "AdamW", "muon": "Muon", "soap": "SOAP"}
SPANS = 12  # of ten rounds
PICTURE = Path("docs/images/nanogpt.png")
COLOURS = {  # of Okabe and Ito
    "nanoGPT's AdamW": "#999999", "AdamW, tuned": "#e69f00", "Muon, tuned": "#d55e00",
    "SOAP, tuned": "#cc79a7", "ThorMuon": "#0072b2",
}  # fmt: skip

Job = dict[str, Any]
Row = dict[str, Any]
Rows = Mapping[str, Row]


# ---- one run -------------------------------------------------------------------------------------


@cache
def example() -> Example:
    """Return the example, read once in a process."""
    for file, what in WHERE.items():
        require(file.is_file(), f"{file} is missing: save {what} there")
    return Example(CODE, TEXT, torch.device("cpu"), SIZES)


def run(job: Job) -> dict[str, Any]:
    """Train once, or time the steps of all."""
    torch.set_num_threads(1)
    with redirect_stdout(None):  # nanoGPT prints its numbers of parameters
        return time_steps() if job.get("alone") else train(job)


def make(model: Any, job: Job) -> torch.optim.Optimizer:
    """Return the optimizer of a job."""
    if job["optimizer"] == "thor-muon":
        return ThorMuon(model)
    if job["optimizer"] == "adamw":
        config = example().config
        betas = config["beta1"], config["beta2"]
        made: torch.optim.Optimizer = model.configure_optimizers(
            config["weight_decay"], job["lr"], betas, "cpu"
        )
        return made
    return CONTENDERS[job["optimizer"]].make(model, lr=job["lr"])


def train(job: Job) -> dict[str, Any]:
    """Train, with an evaluation every 125 steps: step, validation loss, refreshes so far."""
    own = example()
    torch.manual_seed(job["seed"])
    model = own.network()
    optimizer = make(model, job)
    largest = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(job["seed"])
    last, curve, refreshes = own.config["max_iters"], [], 0
    for step in range(last + 1):
        if step % own.config["eval_interval"] == 0 or step == last:
            curve.append((step, own.loss(model), refreshes))
            if not math.isfinite(curve[-1][1]):
                return {"value": None, "failure": f"loss {curve[-1][1]} after {step} steps"}
        if step == last:
            break
        for group, lr in zip(optimizer.param_groups, largest, strict=True):
            group["lr"] = lr * share(step, own.config)
        take_step(own, model, optimizer, own.batch(own.train_text, generator))
        refreshes += bool(getattr(optimizer, "last_refresh", ()))
    return {"value": curve[-1][1], "curve": curve}


def take_step(own: Example, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Train on a batch."""
    model(*batch)[1].backward()
    nn.utils.clip_grad_norm_(model.parameters(), own.config["grad_clip"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def time_steps() -> dict[str, Any]:
    """Time the steps of all in turns: milliseconds, means of each span, and bytes a parameter."""
    own, generator = example(), torch.Generator().manual_seed(0)
    return time_optimizers(
        {name: partial(made, own, name) for name in (*TUNED, "thor-muon")},
        partial(take_step, own),
        lambda: own.batch(own.train_text, generator),
        SPANS,
    )


def made(own: Example, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and its optimizer, whose learning rate serves nothing."""
    model = own.network()
    return model, make(model, {"optimizer": name, "lr": RATE})


def optimizers(job: Job) -> list[str]:
    """Name ours among those that a job trains or times."""
    return ["ThorMuon"] if job.get("optimizer", "thor-muon") == "thor-muon" else []


# ---- what is run ---------------------------------------------------------------------------------


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known: which come next depends on what was best so far."""
    found = [*confirm(OURS), *confirm(THEIRS)]
    found += [job for name in TUNED for job in tuning(rows, name)]
    for setting in chosen(rows).values():
        found += [job for job in confirm(setting) if job not in found]
    return [*found, SINGLE_PROCESS]


def confirm(setting: Job) -> list[Job]:
    """Return the runs of a setting with the seeds that count."""
    return [{**setting, "seed": seed} for seed in SEEDS]


def tuning(rows: Rows, name: str) -> list[Job]:
    """Return the trials of an optimizer, as far as they are known."""
    setting = {"optimizer": name, "seed": TUNING_SEED}
    return rates_around(rows, setting, CONTENDERS[name].lr, count=TRIALS)


def chosen(rows: Rows) -> dict[str, Job]:
    """Return the best setting of each optimizer whose trials are there."""
    best = {name: best_of(rows, tuning(rows, name), count=TRIALS) for name in TUNED}
    return {name: setting for name, setting in best.items() if setting is not None}


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of each that README shows."""
    settings: list[Job] = [OURS, THEIRS, *chosen(rows).values()]
    return [{**setting, "seed": SEEDS[0]} for setting in settings]


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far a value may differ on another machine: as two seeds may."""
    return apart([rows[key_of({**job, "seed": seed})]["value"] for seed in SEEDS])


# ---- what is shown -------------------------------------------------------------------------------


def contestants(rows: Rows) -> dict[str, Job]:
    """Return those that are shown and have all their seeds, by name."""
    settings: dict[str, Job] = {"nanoGPT's AdamW": THEIRS}
    settings |= {f"{TUNED[name]}, tuned": setting for name, setting in chosen(rows).items()}
    settings["ThorMuon"] = OURS
    return {
        name: setting
        for name, setting in settings.items()
        if all(rows.get(key_of(job), {}).get("value") for job in confirm(setting))
    }


def curves(rows: Rows, setting: Job) -> list[list[Sequence[float]]]:
    """Return the curves of all seeds."""
    return [rows[key_of(job)]["curve"] for job in confirm(setting)]


def seconds(rows: Rows, times: Row, setting: Job) -> list[float]:
    """Return the seconds of training up to each evaluation, refreshes where they happen."""
    curve = rows[key_of(confirm(setting)[0])]["curve"]
    return seconds_at(times, setting["optimizer"], "adamw", curve)


def table(rows: Rows) -> str:
    """Return what each ends at and when ThorMuon is there, then the trials."""
    heads = ["optimizer", "learning rate", "validation loss", "ThorMuon is there after: steps"]
    heads += ["seconds", "step / AdamW's", "bytes a parameter"]
    return "\n\n".join([markdown(heads, ends(rows)), trials(rows)])


def ends(rows: Rows) -> list[list[str]]:
    """Return the cells of each contestant."""
    found, lines = contestants(rows), []
    for name, setting in found.items():
        last = [curve[-1][1] for curve in curves(rows, setting)]
        rate = f"{setting['lr']:g}" if "lr" in setting else "none given"
        shares = ["", ""]
        if name != "ThorMuon" and "ThorMuon" in found:
            shares = reached(rows, setting, statistics.fmean(last))
        lines.append([name, rate, with_error(last), *shares, *costs(rows, setting)])
    return lines


def reached(rows: Rows, other: Job, goal: float) -> list[str]:
    """Return the shares of another's steps and seconds after which ThorMuon is at a loss."""
    times, own = rows.get(key_of(SINGLE_PROCESS)), mean_curve(curves(rows, OURS))
    spent = [] if times is None else seconds(rows, times, OURS)
    others = [] if times is None else seconds(rows, times, other)
    return shares_until(own, goal, spent, others, higher=False)


def costs(rows: Rows, setting: Job) -> list[str]:
    """Return the time of a step over AdamW's, and bytes of state a parameter."""
    times = rows.get(key_of(SINGLE_PROCESS))
    if times is None:
        return ["", ""]
    relative = seconds(rows, times, setting)[-1] / seconds(rows, times, THEIRS)[-1]
    return [f"{relative:.2f}", f"{times['state_bytes'][setting['optimizer']]:.1f}"]


def trials(rows: Rows) -> str:
    """Return the validation losses of the trials."""
    lines = [[title, shown(rows, tuning(rows, name))] for name, title in TUNED.items()]
    return markdown(["tuned", "learning rate: validation loss of the trial"], lines)


def draw(rows: Rows) -> None:
    """Draw the losses against steps and seconds."""
    from matplotlib.figure import Figure

    from benchmarks.runner.drawing import legend_below

    times = rows.get(key_of(SINGLE_PROCESS))
    if times is None:
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    against(axes[0], rows, None)
    against(axes[1], rows, times)
    axes[0].set_ylabel("validation loss")
    legend_below(figure, axes[:1])
    save(figure, PICTURE)


def against(panel: "Axes", rows: Rows, times: Row | None) -> None:
    """Draw the losses against seconds, or against steps where there are no times."""
    found = contestants(rows)
    lowest = min(
        point[1] for setting in found.values() for point in mean_curve(curves(rows, setting))
    )
    for name, setting in found.items():
        steps = [step for step, _ in mean_curve(curves(rows, setting))]
        xs = steps if times is None else seconds(rows, times, setting)
        losses = [[point[1] for point in curve] for curve in curves(rows, setting)]
        label = f"{name} ({setting['lr']:g})" if "lr" in setting else f"{name}, no option"
        draw_band(panel, xs, losses, label=label, colour=COLOURS[name])
    panel.set(xlabel="steps" if times is None else "seconds, one core", ylim=(lowest - 0.03, 2.5))
    panel.grid(alpha=0.3)
