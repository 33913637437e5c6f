"""WikiText-2 with the LSTM and the transformer of pytorch/examples: its SGD, AdamW and ThorMuon.

    python -m benchmarks wikitext            # runs what is missing, then tables and picture
    python -m benchmarks wikitext --table

The folder word_language_model of pytorch/examples is read from build/word_language_model: its
model.py, data.py and data/wikitext-2. Sizes, batches, dropout and the clipping of gradients at 0.25
are the defaults of its main.py, and the six epochs and learning rates those of its README. After an
epoch whose validation loss is not the lowest so far, rates are divided by 4, as there; here so are
those of AdamW and ThorMuon. The perplexity is that of the validation text, and the lowest after an
epoch counts, whose weights main.py keeps.

- "their SGD" has the learning rate of their README: 20 for the LSTM, 5 for the transformer.
- AdamW (torch's, as main.py's option --use-optimizer) has five trials of two epochs for each
  network: three learning rates a factor of two apart, then two more beyond the end that the best is
  nearer to. Trials have a seed that serves nothing else, and choose by the validation perplexity.
- ThorMuon has no option but the model.

A training that is cut off goes on after its last whole epoch, if the commit is the same.

Everything runs on a GPU where there is one, or else on one thread. Seconds are steps times the time
of a step, which all optimizers take in turns (jobs named `alone`), relative to SGD's; evaluations
do not count, refreshes count where they happen.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_nanogpt import module_of
from benchmarks.runner.drawing import Contestant, save_contests
from benchmarks.runner.machine import DEVICE, commit, keep_freed_memory
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.numbers import mean_curve, shares_until
from benchmarks.runner.stores import key_of
from benchmarks.runner.timing import RATE, seconds_at, time_optimizers
from benchmarks.runner.trials import best_of, rates_around, shown
from torch_thor import ThorMuon
from torch_thor.errors import require
from torch_thor.files import whole_file

CODE = Path("build/word_language_model")
FILES = ("model.py", "data.py", *(f"data/wikitext-2/{n}.txt" for n in ("train", "valid", "test")))
# the defaults of main.py
SIZE, HIDDEN, LAYERS, HEADS, DROPOUT = 200, 200, 2, 2, 0.2
BATCH, HELD_OUT_BATCH, CONTEXT, CLIP = 20, 10, 35, 0.25
THEIR_RATES = {"LSTM": 20.0, "Transformer": 5.0}
EPOCHS, TRIAL_EPOCHS = 6, 2
EVALUATIONS = 2  # in an epoch
HIGHEST_LOSS = 50.0  # a run whose loss exceeds it, or is no number, has diverged
TUNING_SEED, SEEDS = 10, (0, 1, 2)
TRIALS, ADAMW = 5, 0.001  # the latter is the rate of their README, the middle of the first three
NAMES = {"sgd": "their SGD", "adamw": "AdamW, tuned", "thor-muon": "ThorMuon"}
COLOURS = {"sgd": "#999999", "adamw": "#e69f00", "thor-muon": "#0072b2"}  # of Okabe and Ito
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
    if job["optimizer"] == "thor-muon":
        return ThorMuon(model)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[job["optimizer"]]
    return kind(model.parameters(), lr=job["lr"])


def train(job: Job) -> dict[str, Any]:
    """Train, with several evaluations an epoch: step, perplexity, refreshes so far.

    A trial is evaluated after each epoch alone. After an epoch all that the next one needs is
    saved, and one that was cut off goes on there.
    """
    own = example()
    torch.manual_seed(job["seed"])
    model = own.network(job["network"])
    optimizer = make(model, job)
    after = evaluated(len(list(pieces(own.train))), is_trial=job["seed"] == TUNING_SEED)
    saved = UNFINISHED / f"{key_of(job)}, commit {commit()}.pt"
    past = resumed(saved, model, optimizer) or Past()
    for epoch in range(past.epochs, job["epochs"]):
        reader, loss = Reader(model, BATCH), math.nan
        for number, piece in enumerate(pieces(own.train), start=1):
            take_step(reader, optimizer, piece)
            past.refreshes += bool(getattr(optimizer, "last_refresh", ()))
            if number not in after:
                continue
            step, loss = epoch * max(after) + number, held_out_loss(model, own.held_out)
            if not loss <= HIGHEST_LOSS:
                saved.unlink(missing_ok=True)
                return {"value": None, "failure": f"loss {loss} after {step} steps"}
            past.curve.append((step, math.exp(loss), past.refreshes))
        if loss < past.lowest:
            past.lowest = loss
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4
        past.epochs = epoch + 1
        save_unfinished(saved, model, optimizer, past)
    saved.unlink()
    return {"value": math.exp(past.lowest), "curve": past.curve}


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


def evaluated(steps: int, *, is_trial: bool) -> set[int]:
    """Return the steps of an epoch after which the validation text is read; the last is one."""
    count = 1 if is_trial else EVALUATIONS
    return {math.ceil(steps * part / count) for part in range(1, count + 1)}


def take_step(reader: Reader, optimizer: torch.optim.Optimizer, piece: Piece) -> None:
    """Train on a piece."""
    reader.loss(piece).backward()
    nn.utils.clip_grad_norm_(reader.model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def time_steps(job: Job) -> dict[str, Any]:
    """Time the steps of all in turns, with one network."""
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
    return ["ThorMuon"] if job.get("optimizer", "thor-muon") == "thor-muon" else []


# ---- what is run ---------------------------------------------------------------------------------


def jobs(rows: Rows) -> list[Job]:
    """List the jobs that are known: one seed of all first, then trials, then the other seeds."""
    first, *others = ([*confirm(rows, seed)] for seed in SEEDS)
    trials = [job for network in THEIR_RATES for job in tuning(rows, network)]
    return [*first, *trials, *itertools.chain(*others), *map(timing, THEIR_RATES)]


def confirm(rows: Rows, seed: int) -> Iterator[Job]:
    """Yield the runs with a seed that counts."""
    for network in THEIR_RATES:
        for setting in settings(rows, network).values():
            yield {**setting, "seed": seed}


def settings(rows: Rows, network: str) -> dict[str, Job]:
    """Return the setting of each optimizer, as far as its trials are there."""
    shared = {"network": network, "epochs": EPOCHS}
    found = {
        "sgd": {**shared, "optimizer": "sgd", "lr": THEIR_RATES[network]},
        "thor-muon": {**shared, "optimizer": "thor-muon"},
    }
    best = best_of(rows, tuning(rows, network), count=TRIALS)
    if best is not None:
        found["adamw"] = {**best, **shared}
    return {name: found[name] for name in NAMES if name in found}


def tuning(rows: Rows, network: str) -> list[Job]:
    """Return AdamW's trials, as far as they are known."""
    setting = {"network": network, "optimizer": "adamw", "epochs": TRIAL_EPOCHS}
    return rates_around(rows, {**setting, "seed": TUNING_SEED}, ADAMW, count=TRIALS)


def timing(network: str) -> Job:
    """Return the job that times the steps."""
    return {"alone": True, "network": network}


def headlines(rows: Rows) -> list[Job]:
    """Return one seed of ThorMuon, and of their SGD, with the LSTM."""
    found = settings(rows, "LSTM")
    return [{**found[name], "seed": SEEDS[0]} for name in ("thor-muon", "sgd")]


def tolerance(rows: Rows, job: Job) -> float:
    """Return how far a perplexity may differ on another machine."""
    return 0.03 * float(rows[key_of(job)]["value"])


# ---- what is shown -------------------------------------------------------------------------------


def ran(rows: Rows, setting: Job) -> list[Row]:
    """Return the rows of the seeds that have run."""
    keys = [key_of({**setting, "seed": seed}) for seed in SEEDS]
    return [rows[key] for key in keys if key in rows]


def contestants(rows: Rows, network: str) -> dict[str, Job]:
    """Return those that have run with one seed at least, by name."""
    found = settings(rows, network)
    return {name: setting for name, setting in found.items() if ran(rows, setting)}


def curves(rows: Rows, setting: Job) -> list[list[Sequence[float]]]:
    """Return the curves of the seeds that did not diverge."""
    return [row["curve"] for row in ran(rows, setting) if row["value"] is not None]


def seconds(rows: Rows, setting: Job) -> list[float]:
    """Return the seconds of training up to each evaluation; none before steps are timed."""
    times, found = rows.get(key_of(timing(setting["network"]))), curves(rows, setting)
    if times is None or not found:
        return []
    return seconds_at(times, setting["optimizer"], "sgd", found[0])


def table(rows: Rows) -> str:
    """Return where each ends and when ThorMuon is there, then the trials."""
    heads = ["network", "optimizer", "learning rate", "seeds", "validation perplexity"]
    heads += ["ThorMuon is there after: steps", "seconds", "step / SGD's", "bytes a parameter"]
    lines = [line for network in THEIR_RATES for line in ends(rows, network)]
    tried = [[network, shown(rows, tuning(rows, network))] for network in THEIR_RATES]
    trials = markdown(["AdamW with", "learning rate: validation perplexity of the trial"], tried)
    return "\n\n".join([markdown(heads, lines), trials])


def ends(rows: Rows, network: str) -> list[list[str]]:
    """Return the cells of each contestant with one network."""
    found = contestants(rows, network)
    lines = []
    for name, setting in found.items():
        rate = f"{setting['lr']:g}" if "lr" in setting else "none given"
        values = [row["value"] for row in ran(rows, setting)]
        shares = ["", ""]
        if name != "thor-muon" and "thor-muon" in found and None not in values:
            shares = reached(rows, found["thor-muon"], setting, statistics.fmean(values))
        cells = [network, NAMES[name], rate, str(len(values)), perplexity(values)]
        lines.append([*cells, *shares, *costs(rows, network, name)])
    return lines


def perplexity(values: Sequence[float | None]) -> str:
    """Return the cell of the values of some seeds."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} seeds diverged"
    return with_error(known) if len(known) > 1 else f"{known[0]:.1f}"


def reached(rows: Rows, ours: Job, other: Job, goal: float) -> list[str]:
    """Return the shares of another's steps and seconds after which ThorMuon is at a perplexity."""
    own = mean_curve(curves(rows, ours))
    return shares_until(own, goal, seconds(rows, ours), seconds(rows, other), higher=False)


def costs(rows: Rows, network: str, name: str) -> list[str]:
    """Return the time of a step over SGD's, refreshes included, and bytes of state a parameter."""
    times, found = rows.get(key_of(timing(network))), contestants(rows, network)
    if times is None:
        return ["", ""]
    own, base = seconds(rows, found[name]), seconds(rows, found.get("sgd", found[name]))
    relative = f"{own[-1] / base[-1]:.2f}" if own and base and "sgd" in found else ""
    return [relative, f"{times['state_bytes'][name]:.1f}"]


def draw(rows: Rows) -> None:
    """Draw the perplexities against steps and seconds, a row for each network."""
    contests = {
        f"validation perplexity, {network}": [
            drawn(rows, name, setting)
            for name, setting in contestants(rows, network).items()
            if curves(rows, setting)
        ]
        for network in THEIR_RATES
        if key_of(timing(network)) in rows
    }
    save_contests(contests, PICTURE)


def drawn(rows: Rows, name: str, setting: Job) -> Contestant:
    """Return what is drawn of an optimizer."""
    return Contestant.of_curves(
        NAMES[name], COLOURS[name], curves(rows, setting), seconds(rows, setting)
    )
