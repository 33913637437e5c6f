"""The time of a step over SGD's, and each optimizer's state, on networks of usual size.

    python -m benchmarks step_time           # ten minutes on two quiet cores

A step is forward pass, backward pass and optimizer, of 8 images of 224 pixels or 8 texts of 128
tokens, in float32. All optimizers take turns step by step, in an order that is drawn anew, so a
change in the speed of the machine affects all of them alike; the result is the median of the ratios
within a round. Ours are there twice: between refreshes, and with a refresh of all layers in every
step. The steps are a user's, not those of the application's loop.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.timing import median_ratio, state_bytes, take_turns, training_step
from torch_thor import THOR, ThorMuon
from torch_thor.training.muon import MuonAdamW

NEVER, SMALL = 10**9, 1e-6
_THOR, _MUON = (
    partial(THOR, lr=SMALL, weight_decay=5e-4),
    partial(ThorMuon, lr=SMALL, weight_decay=0.01),
)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(
        model.parameters(), lr=SMALL, momentum=0.9, weight_decay=5e-4
    ),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=SMALL),
    "Muon": partial(MuonAdamW, lr=SMALL, adamw_embeddings=True),
    "THOR": partial(_THOR, update_interval=NEVER),
    "ThorMuon": partial(_MUON, update_interval=NEVER),
    "THOR, refresh": partial(_THOR, update_interval=1, trace_thresholds=(0.0, 0.0)),
    "ThorMuon, refresh": partial(_MUON, update_interval=1),
}
ROUNDS = 5


def jobs(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """List the networks."""
    return [{"model": name, "alone": True} for name in ("resnet50", "bert-base")]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of a network."""
    found = measure(
        job["model"], torch.device("cpu"), 8, 128 if job["model"] == "bert-base" else 224, ROUNDS
    )
    return {"value": median_ratio(found["seconds"]["ThorMuon"], found["seconds"]["SGD"]), **found}


def optimizers(job: dict[str, Any]) -> list[str]:
    """Name ours, which take turns with the others in every job."""
    return ["THOR", "ThorMuon"]


def headlines(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the networks that README shows; a value is ThorMuon's ordinary step over SGD's."""
    return jobs(rows)


def tolerance(rows: dict[str, Any], job: dict[str, Any]) -> float:
    """Return how far the ratio may differ on another processor."""
    return 0.2


def measure(name: str, device: torch.device, batch: int, side: int, rounds: int) -> dict[str, Any]:
    """Time the steps, and return the seconds of each and the bytes of state per parameter.

    On a GPU the steps are in bfloat16.

    Args:
        name: The network.
        device: Where.
        batch: Samples in a batch.
        side: Pixels of a side, or tokens.
        rounds: Steps of each optimizer that count.
    """
    steps, optimizers, elements = {}, {}, 0
    for optimizer, make in OPTIMIZERS.items():
        model = build(name).to(device).to(memory_format=torch.channels_last)
        optimizers[optimizer] = make(model)
        step = training_step(loss_of(name, model, device, batch, side), optimizers[optimizer])
        elements = sum(parameter.numel() for parameter in model.parameters())

        def whole(step: Callable[[], None] = step) -> None:
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()

        steps[optimizer] = whole
    times = take_turns(steps, rounds)  # the warm-up is a refresh for all of ours
    state = {optimizer: state_bytes(own) / elements for optimizer, own in optimizers.items()}
    return {
        "parameters": elements,
        "seconds": {
            optimizer: [round(value, 5) for value in own] for optimizer, own in times.items()
        },
        "state_bytes": {optimizer: round(value, 2) for optimizer, value in state.items()},
    }


def build(name: str) -> nn.Module:
    """Build a network with random weights."""
    torch.manual_seed(0)
    if name.startswith("bert"):
        from transformers import BertConfig, BertForMaskedLM

        tiny: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
        return BertForMaskedLM(BertConfig(**({} if name == "bert-base" else tiny)))
    return torchvision.models.get_model(name)


def loss_of(
    name: str, model: nn.Module, device: torch.device, batch: int, side: int
) -> Callable[[], Tensor]:
    """Return the loss of a random batch."""
    fast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    if name.startswith("bert"):
        tokens = torch.randint(1000, 30_000, (batch, side), device=device)
        return fast(lambda: model(input_ids=tokens, labels=tokens).loss)
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    return fast(lambda: functional.cross_entropy(model(images), labels))


def table(rows: dict[str, Any]) -> str:
    """Return the bytes of state per parameter, and the time of a step over SGD's.

    The time of a refresh is in brackets.
    """
    names, lines = [name for name in OPTIMIZERS if "refresh" not in name], []
    for row in rows.values():
        ratios = {
            name: f"{median_ratio(own, row['seconds']['SGD']):.2f}"
            for name, own in row["seconds"].items()
        }
        refresh = {
            name: f" ({ratios[f'{name}, refresh']})" if f"{name}, refresh" in ratios else ""
            for name in names
        }
        state = row["state_bytes"]
        lines.append(
            [
                row["job"]["model"],
                *(f"{state[name]:.1f}; {ratios[name]}{refresh[name]}" for name in names),
            ]
        )
    return markdown(["network", *names], lines)
