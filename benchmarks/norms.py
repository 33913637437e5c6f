"""Treatments of the weights and biases of normalisation layers: a BERT-like and a ViT-like model, three treatments.

    python benchmarks/norms.py                # runs what is missing in results/norms, then prints the table
    python benchmarks/norms.py --table        # prints the table from the raw data only

Protocol. The application trains with THOR's defaults, except for ``update_interval=50``; learning rates decrease
linearly to 0 over 300 steps. The gradient ∇ of a parameter of a normalisation layer is left as it is (``momentum``,
which is what THOR does), or replaced before the step by ``∇ / (N ∇² + √λ)`` (``diagonal``: the batch as one sample of
the diagonal of the empirical Fisher matrix) or by ``∇ / (∇² / N + √λ)`` (``reference``: what MindSpore's THOR does for
LayerNorm). N is the number of loss terms of the step. Momentum and the bound on the step follow and are the same for
all treatments. For each treatment and model three learning rates are tried with a seed that is used for nothing else
(10). The one with the lowest loss on held-out data is then run with seeds 0, 1 and 2. A seed determines the initial
weights and the batches, which are the same for every treatment.

``bert``: a two-layer BERT (width 64, norms_bert.json), trained as in the recipe ``bert-tiny`` on examples of 32 tokens
from 512 word pieces; the loss is that of the masked tokens only. ``vit``: a four-layer vision transformer (width 96,
patches of 8), trained as in the recipe ``digits`` with images scaled to 32 pixels. Both use LayerNorm.

The benchmark does not cover large models, long trainings or BatchNorm. The data that choose the learning rate are also
the data of the table, with other seeds.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor import THOR
from torch_thor.bench import TUNING_SEED, Folder, Search, describe, markdown, script, stages, trained, write_tables
from torch_thor.training import Ranks, Run, build, evaluate, load_recipe, primary
from torch_thor.training.tasks.images import ImageClassification
from torch_thor.training.tasks.masked_lm import MaskedLM

HERE = Path(__file__).parent
STORE = Folder(HERE / "results" / "norms")
TREATMENTS: dict[str, Callable[[Tensor, int, float], Tensor]] = {  # of a gradient, N and √λ
    "momentum": lambda g, terms, damping: g,
    "diagonal": lambda g, terms, damping: g / (terms * g.square() + damping),
    "reference": lambda g, terms, damping: g / (g.square() / terms + damping),
}
LRS = (0.025, 0.05, 0.1)
STEPS = 300
SETTINGS = [
    "optimizer=thor", "damping=0.03", "update_interval=50", "schedule.kind=linear", f"steps={STEPS}",
    f"eval_interval={STEPS}", "device=cpu",
]  # fmt: skip


class SmallViT(ImageClassification):
    """Image classification with a vision transformer of this benchmark's own size, in the place of a named network."""

    def model(self) -> nn.Module:
        """Build the network."""
        import timm

        shape = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 96, "num_heads": 3, "in_chans": 1}
        vit = timm.create_model("vit_tiny_patch16_224", num_classes=self.outputs, **shape)
        return nn.Sequential(nn.Upsample((32, 32), mode="bilinear"), vit)


TASKS = {  # name -> its class, its recipe, and what is changed in it
    "bert": (
        MaskedLM,
        "bert-tiny",
        [f"model={HERE}/norms_bert.json", "data.text.length=32", "data.text.vocab_size=512"],
    ),
    "vit": (SmallViT, "digits", []),
}


@dataclass(frozen=True)
class Training:
    """One run.

    Args:
        task: key of ``TASKS``.
        treatment: key of ``TREATMENTS``.
        lr: learning rate.
        seed: seed.
    """

    task: str
    treatment: str
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Name of its raw data."""
        return f"{self.task}-{self.treatment}-lr{self.lr:g}-seed{self.seed}"

    def new_run(self) -> Run:
        """Prepare the training."""
        kind, name, words = TASKS[self.task]
        recipe = load_recipe(name, [*SETTINGS, *words, f"lr={self.lr}", f"seed={self.seed}"])
        run = build(recipe, "thor", kind(recipe, torch.device("cpu"), print), Ranks())
        run.optimizer.register_step_pre_hook(self._replace_gradients)
        return run

    def _replace_gradients(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        assert isinstance(optimizer, THOR)
        assert isinstance(optimizer.loss_terms, int)  # the application has set it for this step
        change, damping = TREATMENTS[self.treatment], math.sqrt(optimizer.param_groups[0]["damping"])
        for parameter in norm_parameters(optimizer.model):
            parameter.grad = change(parameter.grad, optimizer.loss_terms, damping)

    def run(self) -> dict[str, Any]:
        """Train."""
        run = self.new_run()
        record, failure = trained(run)  # diverges at a learning rate that is too high: a result, not an accident
        metrics = record.scores[-1].metrics if failure is None else evaluate(run.task, run.model, run.ranks)
        group = run.optimizer.param_groups[0]
        return {
            **asdict(self),
            "steps": STEPS,
            "failure": failure,
            "held_out": {"loss": metrics["loss"], "accuracy": metrics[primary(run.task.metrics).name]},
            "loss": [round(point.loss, 5) for point in record.points],
            "loss_terms": sorted({point.terms for point in record.points}),
            "norm_parameters": len(norm_parameters(run.model)),
            "options": {key: group[key] for key in ("damping", "momentum", "update_interval", "max_update_ratio")},
            "machine": describe(),
        }

    def held_out(self) -> dict[str, float]:
        """Return the figures on held-out data, from the raw data."""
        figures: dict[str, float] = STORE.read(self.key)["held_out"]
        return figures


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the weights and biases of LayerNorm."""
    return [p for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()]


def search(task: str, treatment: str) -> Search[Training]:
    """Return the search for the learning rate of a treatment."""
    tries = [Training(task, treatment, lr, TUNING_SEED) for lr in LRS]
    return Search(tries, lambda run: -run.held_out()["loss"])


def searches() -> list[Search[Training]]:
    """List all searches."""
    return [search(task, treatment) for task in TASKS for treatment in TREATMENTS]


def table() -> str:
    """Return the result as Markdown and write it with the figures as JSON."""
    heads = (
        "model",
        "norms",
        "lr (of 3)",
        "loss on held-out data, mean (each seed)",
        "accuracy, mean (each seed)",
        f"loss in the tuning seed at lr {', '.join(f'{lr:g}' for lr in LRS)}",
    )
    rows: list[tuple[str, ...]] = []
    figures: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        for treatment in TREATMENTS:
            own = search(task, treatment)
            runs, tried = own.chosen(), [run.held_out()["loss"] for run in own.tries]
            of = {name: [run.held_out()[name] for run in runs] for name in runs[0].held_out()}
            cells = [
                markdown.middle(of[name], ".3f", of=statistics.fmean) if name in of else "-"
                for name in ("loss", "accuracy")
            ]
            rows.append((task, treatment, f"{runs[0].lr:g}", *cells, markdown.each(tried, ".3f")))
            figures.setdefault(task, {})[treatment] = {
                "lr": runs[0].lr,
                **of,
                "tuning_loss": dict(zip(LRS, tried, strict=True)),
            }
    text = markdown.table(heads, rows)
    write_tables(STORE.folder, text, figures)
    return text


def main() -> None:
    """Run what is missing and print the table."""
    options = script.parser(__doc__, workers=1).parse_args()
    if not options.table:
        script.measure(STORE, stages(searches), options.workers)
    print(table())


if __name__ == "__main__":
    main()
