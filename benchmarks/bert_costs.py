"""What THOR costs on BERT: its ordinary step over AdamW's, its refresh in ordinary steps, the memory of its curvature.

    python benchmarks/bert_costs.py                       # bert-base, batch 8, 128 tokens, vocabulary 30522
    python benchmarks/bert_costs.py --model bert-mini --out /tmp/costs.json

The steps are those of `torch-thor train` with task: masked-lm (network, loss on the masked tokens and the next-sentence
prediction, row mask, number of loss terms) and each optimizer's default settings, on random tokens. AdamW, THOR and
ThorMuon take turns in a drawn order, on one thread; times are the processor's, so that other programs hardly count.
All layers are refreshed in every second step, so that each round of two has one ordinary step and one refresh;
a ratio is the median of the ratios within a round.
The memory of the curvature is measured, and computed from the layers' sizes, for BERT-large by computation alone.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torch_thor import THOR, ThorMuon
from torch_thor.bench import describe, median_ratio, run_of, step_of, take_turns, write_json
from torch_thor.bench.markdown import table
from torch_thor.training import Batch, Ranks, Recipe
from torch_thor.training.models.bert import BERTS, build
from torch_thor.training.tasks.masked_lm import MaskedLM

RESULTS = Path(__file__).parent / "results"
SPLIT, POSITIONS, MASKED, SPECIAL = 128, 512, 0.15, 5
BASE, FORMS = "adamw", ("thor", "thor-spectral")
FACTORS = ("A", "A_inverse", "G", "G_inverse")  # of a layer's state


def make_batch(vocab_size: int, batch_size: int, length: int) -> Batch:
    """Draw a batch as the task has it: pairs of sentences with 15 % of the tokens to predict."""
    words = torch.randint(SPECIAL, vocab_size, (batch_size, length))
    chosen = torch.rand(batch_size, length).argsort(1) < round(MASKED * length)
    types = (torch.arange(length) >= length // 2).long().repeat(batch_size, 1)
    return {
        "input_ids": torch.where(chosen, 4, words),
        "token_type_ids": types,
        "attention_mask": torch.ones_like(words),
        "labels": torch.where(chosen, words, -100),
        "masked": chosen.sum(1),
        "next_sentence_label": torch.randint(2, (batch_size,)),
    }


class OneBatch(MaskedLM):
    """The task on one batch again and again."""

    steps_per_epoch = 1

    def __init__(self, model: str, vocab_size: int, batch: Batch) -> None:
        size = len(batch["labels"])
        self.recipe = Recipe(task="masked-lm", model=model, batch_size=size, device="cpu", steps=10**9)
        self._held_out, self.vocab_size, self.batch = SimpleNamespace(pairs=True), vocab_size, batch

    def model(self) -> nn.Module:
        """Build the network."""
        return build(self.recipe.model, self.vocab_size, POSITIONS, 0)

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Repeat the batch."""
        return itertools.repeat(self.batch)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with its default settings and a short step."""
    if name == BASE:
        return torch.optim.AdamW(model.parameters(), lr=1e-5)
    kind = THOR if name == "thor" else ThorMuon
    optimizer = kind(model, lr=1e-5, split_dim=SPLIT, update_interval=2)
    for group in optimizer.param_groups:
        group["trace_thresholds"] = (0.0, 0.0)
    return optimizer


def seconds(model: str, batch: Batch, vocab_size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Time the steps."""
    task: Any = OneBatch(model, vocab_size, batch)
    optimizers, steps = {}, {}
    for name in (BASE, *FORMS):
        run = run_of(task.recipe, task, partial(make_optimizer, name))
        optimizers[name], steps[name] = run.optimizer, step_of(run)
    taken = dict.fromkeys(steps, 0)

    def name_of(name: str) -> str:
        taken[name] += 1
        second = taken[name] % 2 == 1  # the warm-up has two steps: a refresh and an ordinary one
        if name != BASE:
            assert bool(optimizers[name].last_refresh) is second
        return name + {BASE: " 2", **dict.fromkeys(FORMS, " refresh")}[name] if second else name

    times = take_turns(steps, 2 * rounds, warm_up=2, name_of=name_of, clock=time.process_time)
    return times, {name: curvature_bytes(optimizers[name]) for name in FORMS}


def curvature_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Add up the memory of all factors and inverses."""
    return sum(state[key].nbytes for state in optimizer.state.values() for key in FACTORS if key in state)


def computed_bytes(model: str, vocab_size: int, *, both: bool) -> int:
    """Compute the memory of the curvature from the layers' sizes, float32."""
    layers, width, _, inner = BERTS[model]

    def blocks(size: int) -> int:
        return size // SPLIT * SPLIT**2 + (size % SPLIT) ** 2

    attention, pooler, transform = [(width, width)] * 4, (width, width), (width, width)
    linear = [*([*attention, (width, inner), (inner, width)] * layers), pooler, transform, (width, 2)]
    numbers = sum(blocks(inputs) + both * blocks(outputs) for inputs, outputs in linear)
    if both:
        numbers += sum(
            size + blocks(width) for size in (vocab_size, POSITIONS, 2)
        )  # the embeddings; their A is diagonal
    return 2 * 4 * numbers


def summary(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Compare the steps."""
    found = {}
    for name in FORMS:
        refresh = median_ratio(times[f"{name} refresh"], times[name])
        found[name] = {
            "ordinary step over AdamW's": median_ratio(times[name], times[BASE]),
            "step with refresh over AdamW's": median_ratio(times[f"{name} refresh"], times[f"{BASE} 2"]),
            "refresh, in ordinary steps": refresh - 1,
        }
    return found


def main() -> None:
    """Time the steps, print a table and write the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BERTS), default="bert-base")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=30522)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="default: results/bert_costs_MODEL.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = make_batch(options.vocab_size, options.batch, options.length)
    times, measured = seconds(options.model, batch, options.vocab_size, options.rounds)
    ratios = summary(times)
    rows = [[key, *(f"{ratios[name][key]:.2f}" for name in FORMS)] for key in ratios[FORMS[0]]]
    computed = {
        model: {name: computed_bytes(model, options.vocab_size, both=name == "thor") for name in FORMS}
        for model in dict.fromkeys((options.model, "bert-large"))
    }
    own = computed[options.model]
    rows += [
        [f"curvature of {options.model}, MB", *(f"{measured[name] / 1e6:.1f}" for name in FORMS)],
        ["the same, computed, MB", *(f"{own[name] / 1e6:.1f}" for name in FORMS)],
        ["curvature of bert-large, computed, MB", *(f"{computed['bert-large'][name] / 1e6:.1f}" for name in FORMS)],
    ]
    print(f"{options.model}, batch {options.batch} x {options.length}, {options.rounds} rounds")
    print(f"median step of AdamW: {statistics.median(times[BASE]):.2f} s")
    print(table(["", "THOR", "ThorMuon"], rows))
    result = {
        "machine": describe(),
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "ratios": ratios,
        "curvature_bytes": {"measured": measured, "computed": computed},
        "seconds": times,
    }
    write_json(options.out or RESULTS / f"bert_costs_{options.model}.json", result, indent=1)


if __name__ == "__main__":
    main()
