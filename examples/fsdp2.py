"""Divide a model and its optimizer among processes with FSDP2 (``fully_shard``).

A small transformer learns the next characters of Python's own language reference. Two processes
take the steps of one on the whole batch: each holds half of every weight and reads half of it.

    torchrun --nproc-per-node 2 examples/fsdp2.py --optimizer adamw thor-muon

Data: part of every Python installation; or any text with ``--data FILE``. GPUs are used if there
are as many as processes. With ``--out FOLDER`` runs are saved; with more ``--steps`` they go on,
on as many processes or on others.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from torch_thor import THOR, Distributed, ThorMuon


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return what trains the model; after ``fully_shard``, which replaces its parameters."""
    if name == "thor-muon":  # the matrices are collected, so that steps are those of one process
        return ThorMuon(model, weight_decay=0.01, distributed=Distributed(whole_matrices=True))
    if name == "thor":  # its blocks end where the parts of the processes end
        return THOR(model, lr=0.05, update_interval=10)
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


class Transformer(nn.Module):
    """From bytes (batch, length + 1) to the loss of all but the first."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, batch: Tensor) -> Tensor:
        x, y = batch[:, :-1], batch[:, 1:]
        places = torch.arange(x.shape[1], device=x.device)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.blocks(self.tokens(x) + self.places(places), mask, is_causal=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, save_at: int | None = None
) -> int:
    """Save what all processes hold together, or else load it; return the step."""
    weights, state = get_state_dict(model, optimizer)
    content: dict[str, Any] = {
        "model": weights,
        "optimizer": state,
        "step": torch.tensor(save_at or 0),
    }
    if save_at is not None:
        dcp.save(content, checkpoint_id=folder)
    elif (folder / ".metadata").exists():
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(content["step"])


def read(file: Path | None) -> bytes:
    """Return a text, or the example's."""
    try:
        return file.read_bytes() if file else "\n".join(topics.values()).encode()
    except OSError as error:
        raise SystemExit(f"no {file}: give a text with --data, or leave it out ({error})") from None


def start() -> str:
    """Join the other processes; return the kind of device."""
    if not dist.is_torchelastic_launched():
        raise SystemExit("start it with torchrun --nproc-per-node 2 examples/fsdp2.py")
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    return "cuda" if cuda else "cpu"


def train(name: str, numbers: Tensor, device: str, args: argparse.Namespace) -> float:
    """Train with an optimizer, and return the last loss, a mean over all processes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # the same weights on all
    model = Transformer(args.width, args.length).to(device)
    mesh = init_device_mesh(device, (ranks,))
    for module in (*model.blocks.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = make_optimizer(name, model)
    if isinstance(optimizer, THOR):  # the loss of a process is a mean over so many
        optimizer.loss_terms = args.batch // ranks * args.length
    mean, first = torch.tensor(float("nan")), 0
    if args.out:
        first = checkpoint(args.out / name, model, optimizer)
    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(args.seed + step)
        starts = torch.randint(len(numbers) - args.length, (args.batch, 1), generator=generator)
        own = starts.chunk(ranks)[rank] + torch.arange(args.length + 1)  # of this process
        loss = model(numbers[own].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step + 1 == args.steps:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"{name}, step {step + 1}: loss {mean:.5f}", flush=True)
    if args.out:
        checkpoint(args.out / name, model, optimizer, save_at=args.steps)
    return mean.item()


def main(words: Sequence[str] | None = None) -> None:
    """Train with each optimizer in turn."""
    parser = argparse.ArgumentParser(description="a small transformer with FSDP2")
    add, known = parser.add_argument, ["adamw", "thor-muon", "thor"]
    add("--optimizer", nargs="+", default=["adamw", "thor-muon"], choices=known)
    add("--data", type=Path, help="a text")
    add("--width", type=int, default=64)
    add("--length", type=int, default=64, help="bytes of context")
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=16, help="of all processes together")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder of the checkpoints")
    args = parser.parse_args(words)

    text, device = read(args.data), start()
    talks = dist.get_rank() == 0
    if talks:
        print(f"{len(text):,} bytes, {args.steps} steps on {dist.get_world_size()} x {device}")
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    losses = {name: train(name, numbers, device, args) for name in args.optimizer}
    for name, loss in losses.items() if talks else ():
        print(f"{name:10} loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
