"""WikiText-2 with the LSTM and the transformer of pytorch/examples: their SGD and ThorMuon.

    python -m benchmarks wikitext            # runs what is missing, then table and picture
    python -m benchmarks wikitext --table

The folder word_language_model of pytorch/examples is read from build/word_language_model: its
model.py, data.py and data/wikitext-2. Sizes, batches, dropout and the clipping of gradients are the
defaults of its main.py, and SGD's learning rates those of its README. After an epoch whose
validation loss is not the lowest so far, rates are divided by 4, as there; ThorMuon's too, but with
`anytime` it keeps its rate. The lowest perplexity of the validation text after an epoch counts,
whose weights main.py keeps. There is one seed; ThorMuon has no option but the model.

Everything runs on a GPU where there is one, or else on one thread. Seconds are steps times the time
of a step, which all optimizers take in turns (jobs named `alone`), relative to SGD's; evaluations
do not count, refreshes count where they happen.
"""

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.nanogpt import module_of
from benchmarks.runner.drawing import draw_band, legend_below, save
from benchmarks.runner.machine import DEVICE
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import RATE, seconds_at, time_optimizers
from torch_thor import ThorMuon
from torch_thor.errors import require

# The processes of the jobs keep the memory that they free: large tensors are otherwise mapped anew
# in each step, and the page faults are a third of it.
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
os.environ |= {"MALLOC_TOP_PAD_": str(2**30)}

CODE = Path("build/word_language_model")
FILES = ("model.py", "data.py", *(f"data/wikitext-2/{n}.txt" for n in ("train", "valid", "test")))
# the defaults of main.py
SIZE, HIDDEN, LAYERS, HEADS, DROPOUT = 200, 200, 2, 2, 0.2
BATCH, HELD_OUT_BATCH, CONTEXT, CLIP = 20, 10, 35, 0.25
THEIR_RATES = {"LSTM": 20.0, "Transformer": 5.0}
EPOCHS, SEED = 3, 0
EVALUATIONS = 2  # in an epoch
HIGHEST_LOSS = 50.0  # a run whose loss exceeds it, or is no number, has diverged
NAMES = {"sgd": "their SGD", "thor-muon": "ThorMuon", "anytime": "ThorMuon(anytime=True)"}
COLOURS = {"sgd": "#999999", "thor-muon": "#0072b2", "anytime": "#d55e00"}  # of Okabe and Ito
SPANS = 5  # of ten rounds
PICTURE = Path("docs/images/wikitext.png")

Job = dict[str, Any]
Rows = Mapping[str, dict[str, Any]]
Piece = tuple[Tensor, Tensor]  # words (length, batch), and those that follow, flat


# ---- their example -------------------------------------------------------------------------------


@cache
def example() -> tuple[ModuleType, int, Tensor, Tensor]:
    """Return their networks, the number of words, and both texts in columns; read once."""
    for name in FILES:
        what = f"save word_language_model/{name} of pytorch/examples there"
        require((CODE / name).is_file(), f"{CODE / name} is missing: {what}")
    corpus = module_of(CODE / "data.py").Corpus(str(CODE / "data" / "wikitext-2"))
    train, held_out = columns(corpus.train, BATCH), columns(corpus.valid, HELD_OUT_BATCH)
    networks, words = module_of(CODE / "model.py"), len(corpus.dictionary)
    return networks, words, train.to(DEVICE), held_out.to(DEVICE)


def network_of(name: str) -> Any:
    """Make a network."""
    networks, words, _, _ = example()
    if name == "Transformer":
        made = networks.TransformerModel(words, SIZE, HEADS, HIDDEN, LAYERS, DROPOUT)
    else:
        made = networks.RNNModel(name, words, SIZE, HIDDEN, LAYERS, DROPOUT)
    return made.to(DEVICE)


def columns(words: Tensor, count: int) -> Tensor:
    """Return a text as columns that are read side by side; what does not fill them is left out."""
    length = len(words) // count
    return words[: length * count].view(count, length).t().contiguous()


def pieces(text: Tensor) -> Iterator[Piece]:
    """Yield the pieces of a text in columns."""
    for start in range(0, len(text) - 1, CONTEXT):
        end = min(start + CONTEXT, len(text) - 1)
        yield text[start:end], text[start + 1 : end + 1].flatten()


class Reader:
    """Reads pieces one after another with a network, an LSTM with its state.

    Args:
        model: The network.
        batch: The number of columns.
    """

    def __init__(self, model: Any, batch: int) -> None:
        self.model = model
        self.hidden = model.init_hidden(batch) if hasattr(model, "init_hidden") else None

    def loss(self, piece: Piece) -> Tensor:
        """Return the loss of the next piece."""
        words, following = piece
        if self.hidden is None:
            scores = self.model(words).flatten(0, 1)
        else:
            scores, hidden = self.model(words, self.hidden)
            self.hidden = tuple(part.detach() for part in hidden)
        return functional.nll_loss(scores, following)


@torch.no_grad()
def held_out_loss(model: nn.Module, optimizer: Any) -> float:
    """Return the mean loss of the validation text, at the average where there is one."""
    text, anytime = example()[3], getattr(optimizer, "anytime", False)
    if anytime:
        optimizer.eval()
    model.eval()
    reader = Reader(model, text.shape[1])
    total = sum(len(piece[0]) * reader.loss(piece).item() for piece in pieces(text))
    model.train()
    if anytime:
        optimizer.train()
    return float(total / (len(text) - 1))


# ---- one run -------------------------------------------------------------------------------------


def run(job: Job) -> dict[str, Any]:
    """Train once, or time the steps of all."""
    torch.set_num_threads(1)
    return time_steps(job["network"]) if job.get("alone") else train(job)


def make(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer; only SGD is given a learning rate."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    return ThorMuon(model, anytime=name == "anytime")


def train(job: Job) -> dict[str, Any]:
    """Train, with several evaluations an epoch: step, perplexity, refreshes so far."""
    torch.manual_seed(job["seed"])
    model = network_of(job["network"])
    optimizer = make(model, job["optimizer"], job.get("lr", 0.0))
    steps = len(list(pieces(example()[2])))
    evaluated = {math.ceil(steps * part / EVALUATIONS) for part in range(1, EVALUATIONS + 1)}
    curve, refreshes, lowest = list[tuple[int, float, int]](), 0, math.inf
    for epoch in range(job["epochs"]):
        reader, loss = Reader(model, BATCH), math.nan
        for number, piece in enumerate(pieces(example()[2]), start=1):
            take_step(reader, optimizer, piece)
            refreshes += bool(getattr(optimizer, "last_refresh", ()))
            if number in evaluated:
                step, loss = epoch * steps + number, held_out_loss(model, optimizer)
                if not loss <= HIGHEST_LOSS:
                    return {"value": None, "failure": f"loss {loss} after {step} steps"}
                curve.append((step, math.exp(loss), refreshes))
        if loss >= lowest and job["optimizer"] != "anytime":
            for group in optimizer.param_groups:
                group["lr"] /= 4
        lowest = min(lowest, loss)
    return {"value": math.exp(lowest), "curve": curve}


def take_step(reader: Reader, optimizer: torch.optim.Optimizer, piece: Piece) -> None:
    """Train on a piece."""
    reader.loss(piece).backward()
    nn.utils.clip_grad_norm_(reader.model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def time_steps(network: str) -> dict[str, Any]:
    """Time the steps of all optimizers in turns, with one network."""
    whole = (piece for piece in itertools.cycle(pieces(example()[2])) if len(piece[0]) == CONTEXT)

    def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network_of(network)
        return model, make(model, name, RATE)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, piece: Piece) -> None:
        take_step(Reader(model, BATCH), optimizer, piece)

    makers = {name: partial(made, name) for name in NAMES}
    return time_optimizers(makers, step, partial(next, whole), SPANS)


def optimizers(job: Job) -> list[str]:
    """Name ours among those that a job trains with or times."""
    return [] if job.get("optimizer") == "sgd" else ["ThorMuon"]


# ---- what is run ---------------------------------------------------------------------------------


def jobs(rows: Rows) -> list[Job]:
    """List the jobs, which do not depend on results."""
    trainings = [training(network, name) for network in THEIR_RATES for name in NAMES]
    return [*trainings, *map(timing, THEIR_RATES)]


def training(network: str, name: str) -> Job:
    """Return the job that trains a network with an optimizer."""
    job = {"network": network, "epochs": EPOCHS, "optimizer": name, "seed": SEED}
    return {**job, "lr": THEIR_RATES[network]} if name == "sgd" else job


def timing(network: str) -> Job:
    """Return the job that times the steps."""
    return {"alone": True, "network": network}


# ---- what is shown -------------------------------------------------------------------------------


def curve_of(rows: Rows, network: str, name: str) -> list[list[float]]:
    """Return the evaluations of a training; none before it has run, or where it diverged."""
    return rows.get(key_of(training(network, name)), {}).get("curve", [])


def seconds(rows: Rows, network: str, name: str) -> list[float]:
    """Return the seconds of training up to each evaluation; none before steps are timed."""
    times = rows.get(key_of(timing(network)))
    return seconds_at(times, name, "sgd", curve_of(rows, network, name)) if times else []


def table(rows: Rows) -> str:
    """Return the perplexities after each epoch, and the time of the training over SGD's."""
    lines = []
    for network, name in itertools.product(THEIR_RATES, NAMES):
        job, curve = training(network, name), curve_of(rows, network, name)
        rate = f"{job['lr']:g}" if "lr" in job else "none given"
        ends = [f"{point[1]:.1f}" for point in curve[EVALUATIONS - 1 :: EVALUATIONS]]
        own, base = (seconds(rows, network, each) for each in (name, "sgd"))
        slower = f"{own[-1] / base[-1]:.2f}" if own and base else "–"
        lines.append([network, NAMES[name], rate, ", ".join(ends) or "–", slower])
    heads = ["network", "optimizer", "learning rate", "validation perplexity after each epoch"]
    return markdown([*heads, "time / SGD's"], lines)


def draw(rows: Rows) -> None:
    """Draw the perplexities against steps and seconds, a row for each network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6 * len(THEIR_RATES)), layout="constrained")
    grid = figure.subplots(len(THEIR_RATES), 2, sharey="row")
    for network, panels in zip(THEIR_RATES, grid, strict=True):
        for name in NAMES:
            curve, spent = curve_of(rows, network, name), seconds(rows, network, name)
            if spent:
                steps, values, _ = zip(*curve, strict=True)
                for panel, xs in zip(panels, (steps, spent), strict=True):
                    draw_band(panel, xs, [values], label=NAMES[name], colour=COLOURS[name])
        panels[0].set(xlabel="steps", ylabel=f"validation perplexity, {network}")
        panels[1].set(xlabel="seconds, one core")
        for panel in panels:
            panel.grid(alpha=0.3)
    legend_below(figure, grid[0][:1])
    save(figure, PICTURE)
