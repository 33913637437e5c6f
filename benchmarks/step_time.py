"""The time of a step over SGD's, and each optimizer's state, on networks of usual size.

    python -m benchmarks step_time           # ten minutes on two quiet cores

A step is forward pass, backward pass and optimizer, of 8 images of 224 pixels or 8 texts of 128
tokens, in float32. All optimizers take turns step by step, in an order that is drawn anew, so a
change in the speed of the machine affects all of them alike; the result is the median of the ratios
within a round. Ours are there twice: between refreshes, and with a refresh of all layers in every
step. The steps are a user's, not those of the application's loop.
"""

from collections.abc import Callable, Mapping
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
_THOR = partial(THOR, lr=SMALL, weight_decay=5e-4)
_MUON = partial(ThorMuon, lr=SMALL, weight_decay=0.01)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), SMALL, 0.9, weight_decay=5e-4),
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
    side = 128 if job["model"] == "bert-base" else 224
    found = measure(job["model"], torch.device("cpu"), 8, side, ROUNDS)
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
    """Time the steps, in bfloat16 on a GPU; `side` is of pixels, or tokens."""
    steps, optimizers, elements = {}, {}, 0
    for optimizer, make in OPTIMIZERS.items():
        model, loss = network(name, device, batch, side)
        optimizers[optimizer] = make(model)
        steps[optimizer] = training_step(loss, optimizers[optimizer])
        elements = sum(parameter.numel() for parameter in model.parameters())
    times = take_turns(steps, rounds)  # the warm-up is a refresh for all of ours
    return {
        "parameters": elements,
        "seconds": {name: [round(value, 5) for value in own] for name, own in times.items()},
        "state_bytes": {
            name: round(state_bytes(own) / elements, 2) for name, own in optimizers.items()
        },
    }


def network(
    name: str, device: torch.device, batch: int, side: int
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a network with random weights on the device, and the loss of a random batch."""
    model = build(name).to(device).to(memory_format=torch.channels_last)
    fast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    if name.startswith(("bert", "gpt2")):
        tokens = torch.randint(1000, 30_000, (batch, side), device=device)
        return model, fast(lambda: model(input_ids=tokens, labels=tokens).loss)
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    return model, fast(lambda: functional.cross_entropy(model(images), labels))


def build(name: str) -> nn.Module:
    """Build BERT-base, GPT-2, one of them with a layer of 32, or a network of torchvision."""
    torch.manual_seed(0)
    if name.startswith("bert"):
        from transformers import BertConfig, BertForMaskedLM

        tiny: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return BertForMaskedLM(BertConfig(**(tiny if name == "bert-tiny" else {})))
    if name.startswith("gpt2"):
        from transformers import GPT2Config, GPT2LMHeadModel

        small: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**(small if name == "gpt2-tiny" else {})))
    return torchvision.models.get_model(name)


def table(rows: Mapping[str, Any]) -> str:
    """Return bytes of state per parameter, and times over SGD's, of a refresh in brackets."""
    names, lines = [name for name in OPTIMIZERS if "refresh" not in name], []
    for row in rows.values():
        cells, base = [row["job"]["model"]], row["seconds"]["SGD"]
        for name in names:
            cell = f"{row['state_bytes'][name]:.1f}; {median_ratio(row['seconds'][name], base):.2f}"
            if f"{name}, refresh" in OPTIMIZERS:
                cell += f" ({median_ratio(row['seconds'][f'{name}, refresh'], base):.2f})"
            cells.append(cell)
        lines.append(cells)
    return markdown(["network", *names], lines)
