"""nanoGPT's example for a CPU: a small GPT learns Shakespeare, character by character.

Sizes, initial weights, batches, learning-rate schedule and evaluation are those of the example in
karpathy/nanoGPT's README; the code is not. ``make_optimizers`` is where the optimizers differ.

    python examples/nanogpt.py --optimizer adamw thor-muon

Data: tinyshakespeare, 1 MB, which the first run downloads; or any text with ``--data FILE``.
"""

import argparse
import math
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor import THOR, ThorMuon

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
DATA, LENGTH, BATCH = Path("corpora/shakespeare.txt"), 64, 12  # characters, contexts of a step


def make_optimizers(name: str, model: "GPT") -> list[torch.optim.Optimizer]:
    """Return what trains the model."""
    if name == "thor-muon":
        return [ThorMuon(model, weight_decay=0.01)]  # the one line; there is no rate to tune
    if name == "thor":
        thor = THOR(model, lr=0.05, update_interval=20)
        thor.loss_terms = BATCH * LENGTH  # the loss is a mean over them, not over sequences
        return [thor]
    inside = [p for p in model.blocks.parameters() if p.ndim == 2]
    tables = [model.characters.weight, model.positions.weight]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = tables if name == "muon" else [*tables, *inside]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))  # nanoGPT's
    # Muon's published rate and decay; it is made for the matrices inside only
    muon = torch.optim.Muon(inside, lr=0.02, momentum=0.95, weight_decay=0.01)
    return [muon, adamw] if name == "muon" else [adamw]


class Block(nn.Module):
    """Causal attention with four heads, then two linear layers; each adds to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)  # (batch, length, width)
        q, k, v = (f(h).unflatten(-1, (4, -1)).transpose(1, 2) for f in self.qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """From characters and those that follow, both (batch, length), to the loss."""

    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(letters, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.characters.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:  # what is added to the residual stream starts smaller, as in GPT-2
                added = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(8) if added else 0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.characters(x) + self.positions(torch.arange(LENGTH)))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def read(file: Path) -> str:
    """Return a text; the example's is downloaded where it is missing."""
    try:
        if file == DATA and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(urllib.request.urlopen(URL).read())
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"no {file}: save {URL} as this file ({error})") from None


def train(name: str, text: str, args: argparse.Namespace) -> float:
    """Train with an optimizer, and return the last validation loss."""
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    parts = {"train": numbers[: len(text) * 9 // 10], "val": numbers[len(text) * 9 // 10 :]}
    torch.manual_seed(args.seed)
    model = GPT(len(letters), args.width)
    optimizers = make_optimizers(name, model)

    def rate(step: int) -> float:
        """Return nanoGPT's schedule: up in 100 steps, then a cosine down to a tenth."""
        warm_up = min(100, args.steps // 20)
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / (args.steps - warm_up)))

    def batch(part: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(parts[part]) - LENGTH, (BATCH, 1), generator=generator)
        found = parts[part][starts + torch.arange(LENGTH + 1)]
        return found[:, :-1], found[:, 1:]

    @torch.no_grad()
    def evaluate(part: str) -> float:
        same = torch.Generator().manual_seed(0)  # batches in each evaluation
        return sum(float(model(*batch(part, same))) for _ in range(20)) / 20

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(1, args.steps + 1):
        model(*batch("train", generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()
        if step % args.eval_every == 0 or step == args.steps:
            loss, val = evaluate("train"), evaluate("val")
            print(f"{name}, step {step}: train loss {loss:.4f}, val loss {val:.4f}", flush=True)
    return val


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Train with each optimizer in turn, and return the last validation losses."""
    parser = argparse.ArgumentParser(description="nanoGPT's example for a CPU")
    add, known = parser.add_argument, ["adamw", "muon", "thor-muon", "thor"]
    add("--optimizer", nargs="+", default=["adamw", "thor-muon"], choices=known)
    add("--data", type=Path, default=DATA, help="a text")
    add("--width", type=int, default=128)
    add("--steps", type=int, default=2000)
    add("--eval-every", type=int, default=250)
    add("--seed", type=int, default=1337)
    args = parser.parse_args(words)

    text = read(args.data)
    print(f"{args.data}, {len(text):,} characters: {args.steps:,} steps of {BATCH * LENGTH}")
    results = {}
    for name in args.optimizer:
        started = time.perf_counter()
        results[name] = train(name, text, args), time.perf_counter() - started
    for name, (loss, seconds) in results.items():
        print(f"{name:10} val loss {loss:.4f} after {seconds:.0f} s")
    return {name: loss for name, (loss, _) in results.items()}


if __name__ == "__main__":
    main()
