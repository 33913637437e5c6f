"""nanoGPT's example of a GPU, Shakespeare by characters: its AdamW and ThorMuon.

model.py and train_shakespeare_char.py of karpathy/nanoGPT are read from build/nanogpt and used as
they are: the network, its AdamW, the batches, the schedule, bfloat16 and the clipping of gradients
are as published, where the best validation loss is 1.4697. The network is compiled. The text is
build/shakespeare/input.txt, tinyshakespeare of karpathy/char-rnn.

AdamW comes from ``configure_optimizers``; ThorMuon has no option but the model, and the schedule
multiplies the learning rate of its groups.

The loss is the mean of 200 batches of validation text (``eval_iters``), drawn once and the same for
all. Seconds are those of training: evaluations do not count, and a training of a few steps goes
first for each, in which the network is compiled.
"""

import importlib.util
import math
import runpy
import sys
import time
from functools import cache
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runner.machine import DEVICE, synchronize
from benchmarks.runner.markdown import table as markdown
from torch_thor import ThorMuon

CODE, TEXT = Path("build/nanogpt"), Path("build/shakespeare/input.txt")
# what the configuration leaves as train.py has it
USUAL = {"weight_decay": 0.1, "beta1": 0.9, "grad_clip": 1.0, "bias": False}
ADAMW, THOR_MUON = "AdamW", "ThorMuon"
WARM_UP = 8  # steps
Config = dict[str, Any]


def module_of(file: Path) -> ModuleType:
    """Import a file."""
    spec = importlib.util.spec_from_file_location(f"fetched_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(file: Path, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """Return the number of characters, and the numbers of both texts: 90 % are for training."""
    text = file.read_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[letter] for letter in text], device=device)
    cut = int(len(numbers) * 0.9)
    return len(letters), numbers[:cut], numbers[cut:]


def adamw(model: Any, config: Config, lr: float, device: str) -> torch.optim.Optimizer:
    """Return nanoGPT's own AdamW."""
    betas = config["beta1"], config["beta2"]
    return model.configure_optimizers(config["weight_decay"], lr, betas, device)


def share(step: int, config: Config) -> float:
    """Return train.py's learning rate in a step, relative to the largest."""
    warm_up, last = config["warmup_iters"], config["lr_decay_iters"]
    least = config["min_lr"] / config["learning_rate"]
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    done = min(1.0, (step - warm_up) / (last - warm_up))
    return float(least + 0.5 * (1.0 + math.cos(math.pi * done)) * (1.0 - least))


class Example:
    """The example: network, batches and evaluation.

    Args:
        code: The folder of model.py and train_shakespeare_char.py.
        text: The file of Shakespeare's text.
        device: Where.
        sizes: What differs from train_shakespeare_char.py.
    """

    def __init__(self, code: Path, text: Path, device: torch.device, sizes: Config) -> None:
        own = runpy.run_path(str(code / "train_shakespeare_char.py"))
        self.config: Config = {**USUAL, **own, **sizes}
        self.module, self.device = module_of(code / "model.py"), device
        self.letters, self.train_text, held_out = texts(text, device)
        generator = torch.Generator().manual_seed(0)
        self.held_out = [self.batch(held_out, generator) for _ in range(self.config["eval_iters"])]
        self.fast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def network(self) -> Any:
        """Make a network on the CPU."""
        keys = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
        own = {key: self.config[key] for key in keys}
        return self.module.GPT(self.module.GPTConfig(vocab_size=self.letters, **own))

    def batch(self, text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a batch: characters, and those that follow."""
        size = self.config["block_size"]
        starts = torch.randint(
            len(text) - size, (self.config["batch_size"], 1), generator=generator
        )
        found = text[starts.to(self.device) + torch.arange(size + 1, device=self.device)]
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Return the loss of the validation batches."""
        model.eval()
        losses = []
        for x, y in self.held_out:
            with self.fast:
                losses.append(model(x, y)[1].float())
        model.train()
        return float(torch.stack(losses).mean())


# ---- trainings -----------------------------------------------------------------------------------


@cache
def example() -> Example:
    """Return the example, read once in a process."""
    return Example(CODE, TEXT, DEVICE, {})


@cache
def networks(name: str) -> tuple[Any, Any]:
    """Return the network of an optimizer, as it is and compiled."""
    model = example().network().to(DEVICE)
    return model, torch.compile(model, disable=DEVICE.type == "cpu")


def missing() -> list[Path]:
    """Return what is not there."""
    files = CODE / "model.py", CODE / "train_shakespeare_char.py", TEXT
    return [file for file in files if not file.exists()]


def jobs() -> list[dict[str, Any]]:
    """List the trainings, in the order of importance."""
    return [{"optimizer": name, "seed": seed} for seed in range(3) for name in (THOR_MUON, ADAMW)]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train once: the losses at each evaluation, with the seconds so far."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as train.py has it
    torch._dynamo.config.recompile_limit = 64  # for all networks together
    compiled(job["optimizer"])
    start = time.perf_counter()
    curve = train(job["optimizer"], job["seed"], example().config["max_iters"])
    return {"curve": curve, "all_seconds": time.perf_counter() - start}  # with evaluations


@cache
def compiled(name: str) -> None:
    """Train for a few steps, for the compiler."""
    train(name, 0, WARM_UP)


def train(name: str, seed: int, last: int) -> list[tuple[int, float, float]]:
    """Train once, and return step, loss and seconds so far of each evaluation."""
    own = example()
    config, (model, forward) = own.config, networks(name)
    torch.manual_seed(seed)
    model.load_state_dict(own.network().state_dict())
    if name == ADAMW:
        optimizer = adamw(model, config, config["learning_rate"], DEVICE.type)
    else:
        optimizer = ThorMuon(model)
    largest = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    curve, seconds = list[tuple[int, float, float]](), 0.0
    for first in range(0, last, config["eval_interval"]):
        curve.append((first, own.loss(forward), seconds))
        synchronize()
        start = time.perf_counter()
        for step in range(first, min(first + config["eval_interval"], last)):
            for group, lr in zip(optimizer.param_groups, largest, strict=True):
                group["lr"] = lr * share(step, config)
            x, y = own.batch(own.train_text, generator)
            with own.fast:
                loss = forward(x, y)[1]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds += time.perf_counter() - start
        if not math.isfinite(loss.item()):
            raise ArithmeticError(f"the loss of step {step} is {loss.item()}")
    return [*curve, (last, own.loss(forward), seconds)]


# ---- what is shown -------------------------------------------------------------------------------


def best(row: dict[str, Any]) -> tuple[int, float, float]:
    """Return step, loss and seconds where the loss is lowest."""
    step, loss, seconds = min(row["curve"], key=lambda point: point[1])
    return int(step), float(loss), float(seconds)


def first_at(row: dict[str, Any], limit: float) -> tuple[int, float] | None:
    """Return step and seconds of the first evaluation at or below a loss."""
    for step, loss, seconds in row["curve"]:
        if loss <= limit:
            return int(step), float(seconds)
    return None


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each training, beside AdamW's best with the same seed."""
    limits = {r["job"]["seed"]: best(r)[1] for r in rows if r["job"]["optimizer"] == ADAMW}
    lines, losses = [], dict[str, list[float]]()
    for row in sorted(rows, key=lambda row: (row["job"]["optimizer"], row["job"]["seed"])):
        name, seed = row["job"]["optimizer"], row["job"]["seed"]
        step, loss, _ = best(row)
        steps, _, seconds = row["curve"][-1]
        reached = first_at(row, limits.get(seed, -math.inf))
        there = "–" if reached is None else f"step {reached[0]}, {reached[1]:.1f} s"
        times = f"{seconds:.1f}", f"{1000 * seconds / steps:.2f}"
        lines.append([name, str(seed), f"{loss:.4f}", str(step), there, *times])
        losses.setdefault(name, []).append(loss)
    heads = ("optimizer", "seed", "best validation loss", "at step", "at AdamW's best")
    text = markdown((*heads, "seconds in all", "ms a step"), lines)
    said = [f"{name} {fmean(own):.4f} ({len(own)})" for name, own in losses.items()]
    return f"{text}\n\nMean of the best (seeds): {', '.join(said)}."
