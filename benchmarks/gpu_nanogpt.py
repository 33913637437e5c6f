"""nanoGPT's example of a GPU, Shakespeare by characters: AdamW, torch's Muon and ThorMuon.

model.py and train_shakespeare_char.py of karpathy/nanoGPT are read from a folder and used as they
are: the network, its AdamW, the batches, the schedule, bfloat16 and the clipping of gradients are
as published, where the best validation loss is 1.4697. The network is compiled.

- "AdamW" comes from ``configure_optimizers``.
- "Muon" is torch's for the matrices of the layers, with the same AdamW for the rest.
- "ThorMuon" has no option but the model; the schedule multiplies the learning rate of its groups.

The loss is the mean of 200 batches of validation text (``eval_iters``), drawn once and the same for
all. Seconds are those of training: evaluations do not count, and a training of a few steps goes
first for each, in which the network is compiled. One line of JSON is appended for each training.
"""

import argparse
import importlib.util
import math
import runpy
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_airbench import append, attempt
from benchmarks.runner.markdown import table as markdown
from torch_thor import ThorMuon

# what the configuration leaves as train.py has it
USUAL = {"weight_decay": 0.1, "beta1": 0.9, "grad_clip": 1.0, "bias": False}
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "batch_size": 2, "block_size": 16}
TINY |= {"max_iters": 20, "lr_decay_iters": 20, "warmup_iters": 2, "eval_interval": 5}
TINY |= {"eval_iters": 2}
ADAMW, THOR_MUON = "AdamW", "ThorMuon"
MUON = {lr: f"Muon {lr:g}" for lr in (0.003, 0.001)}  # with lengths matched to those of AdamW
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


def optimizers(name: str, model: Any, config: Config, device: torch.device) -> list[Any]:
    """Make the optimizers of a training."""
    betas = config["beta1"], config["beta2"]
    if name == THOR_MUON:
        return [ThorMuon(model)]
    lr = config["learning_rate"]
    adamw = model.configure_optimizers(config["weight_decay"], lr, betas, device.type)
    if name == ADAMW:
        return [adamw]
    (rate,) = (lr for lr, called in MUON.items() if called == name)
    matrices = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    decay = config["weight_decay"]
    words = {"weight_decay": decay, "adjust_lr_fn": "match_rms_adamw"}
    return [adamw, torch.optim.Muon(matrices, lr=rate, **words)]


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


class Study(Example):
    """The trainings.

    Args:
        code: The folder of model.py and train_shakespeare_char.py.
        text: The file of Shakespeare's text.
        device: Where.
        tiny: Whether the network is small and not compiled.
    """

    def __init__(self, code: Path, text: Path, device: torch.device, *, tiny: bool) -> None:
        super().__init__(code, text, device, TINY if tiny else {})
        self.tiny = tiny
        self.models: dict[str, tuple[Any, Any]] = {}

    def train(self, name: str, seed: int, steps: int | None = None) -> dict[str, Any]:
        """Train once, and return the losses at each evaluation with the seconds so far."""
        config, device = self.config, self.device
        torch.manual_seed(seed)
        # compiled once for each optimizer
        fresh = self.network()
        if name not in self.models:
            model = self.network().to(device)
            self.models[name] = model, model if self.tiny else torch.compile(model)
        model, run = self.models[name]
        model.load_state_dict(fresh.state_dict())
        made = optimizers(name, model, config, device)
        groups = [group for optimizer in made for group in optimizer.param_groups]
        largest = [group["lr"] for group in groups]
        generator = torch.Generator().manual_seed(seed)
        curve: list[tuple[int, float, float]] = []
        seconds, last = 0.0, steps or config["max_iters"]
        for step in range(last + 1):
            if step % config["eval_interval"] == 0 or step == last:
                curve.append((step, self.loss(run), seconds))
                self.wait()
                start, before = time.perf_counter(), seconds
            if step == last:
                break
            for group, lr in zip(groups, largest, strict=True):
                group["lr"] = lr * share(step, config)
            x, y = self.batch(self.train_text, generator)
            with self.fast:
                loss = run(x, y)[1]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if (step + 1) % config["eval_interval"] == 0 or step + 1 == last:
                self.wait()
                seconds = before + time.perf_counter() - start
                if not math.isfinite(value := float(loss.detach())):
                    raise ArithmeticError(f"the loss of step {step} is {value}")
        return {"curve": curve}

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def jobs(seeds: int) -> Iterator[tuple[str, int]]:
    """Yield optimizer and seed of all trainings, in the order of importance."""
    for name in (THOR_MUON, ADAMW, *MUON.values()):
        yield name, 0
    for seed in range(1, seeds):
        yield THOR_MUON, seed
        yield ADAMW, seed


def run(options: argparse.Namespace) -> None:
    """Train all, as far as the time goes."""
    end, device = time.monotonic() + options.seconds, torch.device(options.device)
    # as train.py has it
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64  # for all networks together
    study = Study(options.code, options.text, device, tiny=options.tiny)
    taken: dict[str, float] = {}
    for name, seed in jobs(1 if options.tiny else 3):
        if time.monotonic() + taken.get(name, 20.0 * (not options.tiny)) > end:
            print("out of time", flush=True)
            return
        start = time.monotonic()
        if name not in taken:
            attempt(partial(study.train, name, seed, WARM_UP))
            print(f"{name}: warm after {time.monotonic() - start:.1f} s", flush=True)
        start = time.monotonic()
        row = attempt(partial(study.train, name, seed))
        taken[name] = time.monotonic() - start
        row["all_seconds"] = taken[name]  # with evaluations
        append(options.out, {"job": {"optimizer": name, "seed": seed}, **row})


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
    done = [row for row in rows if "curve" in row]
    limits = {r["job"]["seed"]: best(r)[1] for r in done if r["job"]["optimizer"] == ADAMW}
    lines = []
    for row in sorted(done, key=lambda row: (row["job"]["optimizer"], row["job"]["seed"])):
        step, loss, _ = best(row)
        steps, _, seconds = row["curve"][-1]
        reached = first_at(row, limits.get(row["job"]["seed"], -math.inf))
        there = "–" if reached is None else f"step {reached[0]}, {reached[1]:.1f} s"
        job = row["job"]
        own = [job["optimizer"], str(job["seed"]), f"{loss:.4f}", str(step), there]
        lines.append([*own, f"{seconds:.1f}", f"{1000 * seconds / steps:.2f}"])
    heads = ("optimizer", "seed", "best validation loss", "at step", "at AdamW's best")
    text = markdown((*heads, "seconds in all", "ms a step"), lines)
    names = sorted({row["job"]["optimizer"] for row in done})
    means = {
        name: [best(row)[1] for row in done if row["job"]["optimizer"] == name] for name in names
    }
    said = [f"{name} {mean(own):.4f} ({len(own)})" for name, own in means.items()]
    return f"{text}\n\nMean of the best (seeds): {', '.join(said)}."


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--code", type=Path, required=True, help="folder of nanoGPT's two files")
    parser.add_argument("--text", type=Path, required=True, help="input.txt of tinyshakespeare")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--seconds", type=float, default=1e9, help="no training starts later")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a small network, not compiled")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
