"""WikiText-2 with the LSTM and the transformer of pytorch/examples: their SGD and ThorMuon.

    python -m benchmarks wikitext            # runs what is missing, then table and picture
    python -m benchmarks wikitext --table

The folder word_language_model of pytorch/examples is read from build/word_language_model: its
model.py, data.py and data/wikitext-2. Sizes, batches, dropout and the clipping of gradients at 0.25
are the defaults of its main.py, and the learning rates those of its README. After an epoch whose
validation loss is not the lowest so far, rates are divided by 4, as there; here so is ThorMuon's.
That is all that changes them, so the three epochs are the first half of the README's six. The
perplexity is measured on the validation text, and the lowest after an epoch counts, whose weights
main.py keeps. There is one seed.

- "their SGD" has the learning rate of their README: 20 for the LSTM, 5 for the transformer.
- ThorMuon has no option but the model.
- ThorMuon with `anytime` keeps its rate, is evaluated after `eval`, and goes on after `train`.

A training that is cut off goes on after its last whole epoch, if the commit is the same.

Everything runs on a GPU where there is one, or else on one thread. Seconds are steps times the time
of a step, which both optimizers take in turns (jobs named `alone`), relative to SGD's; evaluations
do not count, refreshes count where they happen.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.nanogpt import module_of
from benchmarks.runner.drawing import Contestant, save_contests
from benchmarks.runner.machine import DEVICE, commit, keep_freed_memory
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.numbers import mean_curve, shares_until
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import RATE, seconds_at, time_optimizers
from torch_thor import ThorMuon
from torch_thor.errors import require
from torch_thor.files import whole_file

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
UNFINISHED = Path("build/wikitext")  # where trainings that were cut off go on

Job = dict[str, Any]
Row = dict[str, Any]
Rows = Mapping[str, Row]
Piece = tuple[Tensor, Tensor]  # words (length, batch), and those that follow, flat


# ---- their example -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """The example: networks and texts.

    Args:
        networks: Their module of networks.
        words: The number of words.
        train: The training text in columns.
        held_out: The validation text in columns.
    """

    networks: ModuleType
    words: int
    train: Tensor
    held_out: Tensor

    def network(self, name: str) -> Any:
        """Make a network."""
        if name == "Transformer":
            sizes = (self.words, SIZE, HEADS, HIDDEN, LAYERS, DROPOUT)
            return self.networks.TransformerModel(*sizes).to(DEVICE)
        return self.networks.RNNModel(name, self.words, SIZE, HIDDEN, LAYERS, DROPOUT).to(DEVICE)


@cache
def example() -> Example:
    """Return the example, read once in a process."""
    for name in FILES:
        what = f"save word_language_model/{name} of pytorch/examples there"
        require((CODE / name).is_file(), f"{CODE / name} is missing: {what}")
    corpus = module_of(CODE / "data.py").Corpus(str(CODE / "data" / "wikitext-2"))
    return Example(
        module_of(CODE / "model.py"),
        len(corpus.dictionary),
        columns(corpus.train, BATCH).to(DEVICE),
        columns(corpus.valid, HELD_OUT_BATCH).to(DEVICE),
    )


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
def held_out_loss(model: nn.Module, text: Tensor) -> float:
    """Return the mean loss of a text in columns."""
    model.eval()
    reader = Reader(model, text.shape[1])
    total = sum(len(piece[0]) * reader.loss(piece).item() for piece in pieces(text))
    model.train()
    return float(total / (len(text) - 1))


# ---- one run -------------------------------------------------------------------------------------


def run(job: Job) -> dict[str, Any]:
    """Train once, or time the steps of all."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return time_steps(job) if job.get("alone") else train(job)


def make(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Return the optimizer of a job."""
    if job["optimizer"] != "sgd":
        return ThorMuon(model, anytime=job["optimizer"] == "anytime")
    return torch.optim.SGD(model.parameters(), lr=job["lr"])


def train(job: Job) -> dict[str, Any]:
    """Train, with several evaluations an epoch: step, perplexity, refreshes so far.

    After an epoch all that the next one needs is saved, and one that was cut off goes on there.
    """
    own = example()
    torch.manual_seed(job["seed"])
    model = own.network(job["network"])
    optimizer = make(model, job)
    after = evaluated(len(list(pieces(own.train))))
    saved = UNFINISHED / f"{key_of(job)}, commit {commit()}.pt"
    past = resumed(saved, model, optimizer) or Past()
    for epoch in range(past.epochs, job["epochs"]):
        reader, loss = Reader(model, BATCH), math.nan
        for number, piece in enumerate(pieces(own.train), start=1):
            take_step(reader, optimizer, piece)
            past.refreshes += bool(getattr(optimizer, "last_refresh", ()))
            if number not in after:
                continue
            with averaged(optimizer):
                step, loss = epoch * max(after) + number, held_out_loss(model, own.held_out)
            if not loss <= HIGHEST_LOSS:
                saved.unlink(missing_ok=True)
                return {"value": None, "failure": f"loss {loss} after {step} steps"}
            past.curve.append((step, math.exp(loss), past.refreshes))
        if loss < past.lowest:
            past.lowest = loss
        elif job["optimizer"] != "anytime":
            for group in optimizer.param_groups:
                group["lr"] /= 4
        past.epochs = epoch + 1
        save_unfinished(saved, model, optimizer, past)
    saved.unlink()
    return {"value": math.exp(past.lowest), "curve": past.curve}


@contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """Put the average of an optimizer that has one into the parameters, for an evaluation."""
    if not getattr(optimizer, "anytime", False):
        yield
        return
    optimizer.eval()
    yield
    optimizer.train()


@dataclass
class Past:
    """What a training has behind it.

    Args:
        epochs: The number of epochs.
        lowest: The lowest loss after one.
        refreshes: The number of refreshes.
        curve: The evaluations.
    """

    epochs: int = 0
    lowest: float = math.inf
    refreshes: int = 0
    curve: list[tuple[int, float, int]] = field(default_factory=list)


def save_unfinished(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, past: Past
) -> None:
    """Save all that the next epoch needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    states: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if DEVICE.type == "cuda":  # where dropout draws
        states["random of the GPU"] = torch.cuda.get_rng_state()
    with whole_file(path) as temporary:
        torch.save({**states, "past": asdict(past), "random": torch.get_rng_state()}, temporary)


def resumed(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Past | None:
    """Load what was saved, and return what is behind it; None where nothing was."""
    if not path.exists():
        return None
    saved = torch.load(path, map_location="cpu")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    if DEVICE.type == "cuda":
        torch.cuda.set_rng_state(saved["random of the GPU"])
    return Past(**saved["past"])


def evaluated(steps: int) -> set[int]:
    """Return the steps of an epoch after which the validation text is read; the last is one."""
    return {math.ceil(steps * part / EVALUATIONS) for part in range(1, EVALUATIONS + 1)}


def take_step(reader: Reader, optimizer: torch.optim.Optimizer, piece: Piece) -> None:
    """Train on a piece."""
    reader.loss(piece).backward()
    nn.utils.clip_grad_norm_(reader.model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def time_steps(job: Job) -> dict[str, Any]:
    """Time the steps of both in turns, with one network."""
    own = example()
    makers = {name: partial(made, own, job["network"], name) for name in NAMES}
    whole = (piece for piece in itertools.cycle(pieces(own.train)) if len(piece[0]) == CONTEXT)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, piece: Piece) -> None:
        take_step(Reader(model, BATCH), optimizer, piece)

    return time_optimizers(makers, step, partial(next, whole), SPANS)


def made(own: Example, network: str, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and an optimizer, whose learning rate serves nothing."""
    model = own.network(network)
    return model, make(model, {"optimizer": name, "lr": RATE})


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


def headlines(rows: Rows) -> list[Job]:
    """Return the trainings of the LSTM."""
    return [training("LSTM", name) for name in NAMES]


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far a perplexity may differ on another machine."""
    return 0.03 * float(rows[key_of(job)]["value"])


# ---- what is shown -------------------------------------------------------------------------------


def finished(rows: Rows, network: str) -> dict[str, Row]:
    """Return the trainings of a network that ended without diverging, by optimizer."""
    found = {name: rows.get(key_of(training(network, name))) for name in NAMES}
    return {name: row for name, row in found.items() if row and row["value"] is not None}


def seconds(rows: Rows, network: str, name: str) -> list[float]:
    """Return the seconds of training up to each evaluation; none before steps are timed."""
    times = rows.get(key_of(timing(network)))
    if times is None:
        return []
    return seconds_at(times, name, "sgd", finished(rows, network)[name]["curve"])


def table(rows: Rows) -> str:
    """Return where each ends, and when ThorMuon is where their SGD ends."""
    heads = ["network", "optimizer", "learning rate", "validation perplexity after each epoch"]
    heads += ["ThorMuon is there after: steps", "seconds", "time / SGD's", "bytes a parameter"]
    return markdown(heads, [line for network in THEIR_RATES for line in ends(rows, network)])


def ends(rows: Rows, network: str) -> list[list[str]]:
    """Return the cells of each training that is there, with one network."""
    lines = []
    for name, label in NAMES.items():
        job = training(network, name)
        if key_of(job) in rows:
            rate = f"{job['lr']:g}" if "lr" in job else "none given"
            lines.append([network, label, rate, *outcome(rows, network, name)])
    return lines


def outcome(rows: Rows, network: str, name: str) -> list[str]:
    """Return the perplexities of a training, when ThorMuon is at the lowest, and what it costs."""
    found = finished(rows, network)
    if name not in found:
        return ["diverged", "", "", "", ""]
    values = [point[1] for point in found[name]["curve"][EVALUATIONS - 1 :: EVALUATIONS]]
    shares = reached(rows, network) if name == "sgd" and "thor-muon" in found else ["", ""]
    return [", ".join(f"{value:.1f}" for value in values), *shares, *costs(rows, network, name)]


def reached(rows: Rows, network: str) -> list[str]:
    """Return the shares of SGD's steps and seconds after which ThorMuon is where SGD ends."""
    found = finished(rows, network)
    own, goal = mean_curve([found["thor-muon"]["curve"]]), found["sgd"]["value"]
    spent = [seconds(rows, network, name) for name in ("thor-muon", "sgd")]
    return shares_until(own, goal, *spent, higher=False)


def costs(rows: Rows, network: str, name: str) -> list[str]:
    """Return the time of training over SGD's, and the bytes of state a parameter."""
    times = rows.get(key_of(timing(network)))
    if times is None or "sgd" not in finished(rows, network):
        return ["", ""]
    own, base = (seconds(rows, network, which)[-1] for which in (name, "sgd"))
    return [f"{own / base:.2f}", f"{times['state_bytes'][name]:.1f}"]


def draw(rows: Rows) -> None:
    """Draw the perplexities against steps and seconds, a row for each network."""
    contests = {
        f"validation perplexity, {network}": [
            Contestant.of_curves(
                NAMES[name], COLOURS[name], [row["curve"]], seconds(rows, network, name)
            )
            for name, row in finished(rows, network).items()
        ]
        for network in THEIR_RATES
        if key_of(timing(network)) in rows
    }
    save_contests(contests, PICTURE)
