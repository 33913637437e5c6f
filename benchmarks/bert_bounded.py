"""What limits THOR with its bound on the step on BERT: other bounds, damping values, intervals and factors, one by one.

    python benchmarks/bert_bounded.py          # what is missing under results/bert_bounded, then the table
    python benchmarks/bert_bounded.py --table  # the table alone, from the raw data

Protocol. The task is that of bert.py with a batch of 32, whose corpus has to be prepared first. The reference is the
setting of ``thor`` there: damping 0.01, a refresh every 20 steps, momentum 0.8. Each variant changes one option, or two
where its name says so, and has three learning rates, tried with a seed that is used for nothing else. The one with the
highest accuracy on masked tokens of held-out text runs with three other seeds, unless that accuracy is below the one of
the reference.
"""

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bert import CONTESTS, CORPUS, open_task
from torch_thor import THOR
from torch_thor.bench import (
    TUNING_SEED,
    Folder,
    Search,
    describe,
    evaluations_of,
    final_accuracy,
    markdown,
    run_of,
    script,
    stages,
    trained,
    write_tables,
)

STORE = Folder(Path(__file__).parent / "results" / "bert_bounded")
CONTEST = CONTESTS[0]
LRS = (0.025, 0.05, 0.1)
REFERENCE = {"momentum": 0.8, "damping": 0.01, "update_interval": 20}
REFERENCE_NAME, MIXED = "reference", "damping 0.001, AdamW for embeddings, biases and norms"
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE_NAME: {},
    "damping 0.0001": {"damping": 0.0001},
    "damping 0.001": {"damping": 0.001},
    "damping 0.1": {"damping": 0.1},
    "refresh every 5 steps": {"update_interval": 5},
    "refresh every 100 steps": {"update_interval": 100},
    "bound 0.003": {"max_update_ratio": 0.003},
    "bound 0.03": {"max_update_ratio": 0.03},
    "bound 0.1": {"max_update_ratio": 0.1},
    "kl_clip 0.001": {"kl_clip": 0.001},
    "kl_clip 0.01": {"kl_clip": 0.01},
    "factor_decay 0.9": {"factor_decay": 0.9},
    "full factors": {"split_dim": None},
    "weight decay 0.01": {"weight_decay": 0.01},
    "embeddings with momentum": {"layers": "-*_embeddings"},
    "damping 0.001, bound 0.03": {"damping": 0.001, "max_update_ratio": 0.03},
    MIXED: {"damping": 0.001, "layers": "-*_embeddings"},
}
ADAMW_LR = 0.002  # the best one of AdamW in bert.py


@dataclass(frozen=True)
class Training:
    """One run.

    Args:
        variant: A key of ``VARIANTS``.
        lr: Learning rate.
        seed: Seed.
    """

    variant: str
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Name of its raw data."""
        return f"{self.variant.replace(',', '').replace(' ', '-')}-lr{self.lr:g}-seed{self.seed}"

    def run(self) -> dict[str, Any]:
        """Train."""
        task = open_task(CONTEST, self.seed, CORPUS)
        options: dict[str, Any] = {**REFERENCE, **VARIANTS[self.variant]}
        run = run_of(task.recipe, task, lambda model: THOR(model, lr=self.lr, **options))
        if self.variant == MIXED:
            assert isinstance(run.optimizer, THOR)
            leave_to_adamw(run.model, run.optimizer)
        record, failure = trained(run)  # diverges at a learning rate that is too high: a result, not an accident
        return {
            **asdict(self),
            "options": options,
            "failure": failure,
            "evaluations": evaluations_of(run, record),
            "loss": [round(point.loss, 4) for point in record.points],
            "machine": describe(),
        }

    def final(self) -> float:
        """Return the accuracy at the last step; 0 for a run that diverged."""
        return final_accuracy(STORE.read(self.key))


def leave_to_adamw(model: nn.Module, thor: THOR) -> None:
    """Give embeddings, biases and norms to AdamW, as Muon of bert.py does, with the schedule of THOR."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2 or id(parameter) in embeddings]
    adamw = torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.8, 0.99), weight_decay=0.01)
    peak = float(thor.param_groups[0]["lr"])

    def step(*_: Any) -> None:
        adamw.param_groups[0]["lr"] = ADAMW_LR * float(thor.param_groups[0]["lr"]) / peak
        adamw.step()
        adamw.zero_grad()  # THOR leaves out parameters without a gradient

    thor.register_step_pre_hook(step)


def search(variant: str) -> Search[Training]:
    """Return the search for the learning rate of a variant."""
    return Search([Training(variant, lr, TUNING_SEED) for lr in LRS], Training.final)


def searches() -> list[Search[Training]]:
    """List all searches."""
    return [search(variant) for variant in VARIANTS]


def repeated() -> list[str]:
    """List the variants that run with the other seeds: the reference, and those that are not below it when tried."""
    least = search(REFERENCE_NAME).best().final()
    return [variant for variant in VARIANTS if search(variant).best().final() >= least]


def chosen() -> list[Training]:
    """List the runs with the other seeds."""
    return [run for variant in repeated() for run in search(variant).chosen()]


def table() -> str:
    """Return the result as Markdown and write it with the figures as JSON."""
    heads = (
        "THOR with",
        "lr (of 3)",
        "accuracy on masked tokens, mean (each seed)",
        f"in the tuning seed at lr {', '.join(f'{lr:g}' for lr in LRS)}",
    )
    rows: list[tuple[str, ...]] = []
    figures: dict[str, Any] = {}
    again = repeated()
    for variant in VARIANTS:
        own = search(variant)
        lr, tried = own.best().lr, [run.final() for run in own.tries]
        found = [run.final() for run in own.chosen()] if variant in again else []
        middle = markdown.middle(found, ".2%", of=statistics.fmean) if found else "not repeated"
        rows.append((variant, f"{lr:g}", middle, markdown.each(tried, ".2%")))
        figures[variant] = {"lr": lr, "accuracy": found, "tuning_accuracy": dict(zip(LRS, tried, strict=True))}
    text = markdown.table(heads, rows)
    write_tables(STORE.folder, text, figures)
    return text


def main() -> None:
    """Run what is missing and print the table."""
    options = script.parser(__doc__).parse_args()
    if not options.table:
        script.measure(STORE, [stages(searches)[0], chosen], options.workers)
    print(table())


if __name__ == "__main__":
    main()
