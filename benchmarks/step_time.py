"""The time of a step over that of SGD or AdamW, and the state that each keeps, on networks of usual size.

    python -m torch_thor.bench step_time           # ten minutes on two quiet cores
    python -m torch_thor.bench step_time --table

A step is forward pass, backward pass and optimizer. All optimizers take turns step by step, in an order that is drawn
anew, so a change in the speed of the machine affects all of them alike; the result is the median of the ratios within a
round. Ours are there twice: between refreshes, and with a refresh of all layers in every step. The steps are a user's,
not those of the application's loop.
"""

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from torch_thor import THOR, ThorMuon
from torch_thor.bench import median_ratio, state_bytes, take_turns, training_step
from torch_thor.bench.markdown import table as markdown
from torch_thor.training.muon import MuonAdamW

NEVER, SMALL = 10**9, 1e-6
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=SMALL, momentum=0.9, weight_decay=5e-4),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=SMALL),
    "Muon": lambda model: MuonAdamW(model, lr=SMALL, adamw_embeddings=True),
    "THOR": lambda model: THOR(model, lr=SMALL, weight_decay=5e-4, update_interval=NEVER),
    "ThorMuon": lambda model: ThorMuon(model, lr=SMALL, weight_decay=0.01, update_interval=NEVER),
    "THOR, refresh": lambda model: THOR(
        model, lr=SMALL, weight_decay=5e-4, update_interval=1, trace_thresholds=(0.0, 0.0)
    ),
    "ThorMuon, refresh": lambda model: ThorMuon(model, lr=SMALL, weight_decay=0.01, update_interval=1),
}
ROUNDS = 7


def jobs(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """List the networks."""
    return [{"model": name, "alone": True} for name in ("resnet50", "bert-base")]


def loss_of(name: str, model: nn.Module) -> Callable[[], Tensor]:
    """Return the loss of a random batch: 8 images of 224 pixels, or 8 texts of 128 tokens."""
    if name == "bert-base":
        tokens = torch.randint(1000, 30_000, (8, 128))
        return lambda: model(input_ids=tokens, labels=tokens).loss
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))
    return lambda: functional.cross_entropy(model(images), labels)


def build(name: str) -> nn.Module:
    """Build a network with random weights."""
    torch.manual_seed(0)
    if name == "bert-base":
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(BertConfig())
    return torchvision.models.get_model(name)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps: ratios to SGD's, its seconds, and the bytes of state for each parameter."""
    steps, optimizers, elements = {}, {}, 0
    for name, make in OPTIMIZERS.items():
        model = build(job["model"])
        optimizers[name] = make(model)
        steps[name] = training_step(loss_of(job["model"], model), optimizers[name])
        elements = sum(parameter.numel() for parameter in model.parameters())
    times = take_turns(steps, ROUNDS)  # the warm-up is a refresh for all of ours
    state = {name: state_bytes(optimizer) / elements for name, optimizer in optimizers.items()}
    return {
        "parameters": elements,
        "seconds": {name: [round(value, 4) for value in own] for name, own in times.items()},
        "state_bytes": {name: round(value, 2) for name, value in state.items()},
    }


def table(rows: dict[str, Any]) -> str:
    """Return ratios and bytes."""
    lines = []
    for row in rows.values():
        seconds, state = row["seconds"], row["state_bytes"]
        ratios = {name: f"{median_ratio(own, seconds['SGD']):.2f}" for name, own in seconds.items()}
        lines.append([row["job"]["model"], "step over SGD's", *ratios.values()])
        lines.append(["", "bytes of state a parameter", *(f"{value:.1f}" for value in state.values())])
    return markdown(["network", "", *OPTIMIZERS], lines)
