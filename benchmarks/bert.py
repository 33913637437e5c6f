r"""Masked-language-model pretraining of a two-layer BERT: THOR and ThorMuon against tuned LAMB, AdamW, Muon and SOAP.

    apt-get install -y anarchism python3.11-doc perl-doc
    torch-thor prepare /usr/share/doc/anarchism/html /usr/share/doc/python3.11/html /usr/share/perl/5.36.0/pod \
        --out corpora/debian --vocab-size 2048 --seq-len 64,128
    python benchmarks/bert.py --corpus corpora/debian  # what is missing under results/bert, then tables
    python benchmarks/bert.py --table                  # tables and the picture alone, from the raw data

Protocol. The recipe is ``bert-tiny``, on examples of 64 tokens of English documentation and prose (36 MB of text), with
batches of 32 and of 512 examples (in 16 parts). The learning rate grows over the first 5 % of the steps and then falls
linearly to 0. Every optimizer has the same budget: five learning rates a factor of two apart, with each of two momenta
(AdamW's, LAMB's and SOAP's first beta), in a seed that is used for nothing else. What ends with the highest accuracy on
masked tokens of held-out documents runs with three other seeds. Muon leaves embeddings, biases and norms to AdamW, at
the learning rate that was best for AdamW. A seed decides the weights, the order of the examples, their pairs and masks.

Steps to a target are interpolated between two evaluations. Seconds in the raw data depend on what else the machine did:
step times are taken side by side by bert_time.py. What it is not: a large network or a long training.
"""

import time
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_thor import LAMB, THOR, ThorMuon
from torch_thor.bench import (
    TUNING_SEED,
    Folder,
    Search,
    describe,
    evaluations_of,
    final_accuracy,
    run_of,
    script,
    stages,
    trained,
)
from torch_thor.training import load_recipe
from torch_thor.training.muon import MuonAdamW
from torch_thor.training.tasks.masked_lm import MaskedLM

STORE = Folder(Path(__file__).parent / "results" / "bert")
CORPUS = Path("corpora/debian")
RATES = 5  # learning rates, each twice the one before it
WARM_UP = 0.05  # of the steps

# The lowest learning rate, and the two momenta (or first betas), the usual one first.
GRIDS: dict[str, tuple[float, tuple[float, float]]] = {
    "adamw": (0.0005, (0.9, 0.8)),
    "lamb": (0.0025, (0.9, 0.8)),
    "thor": (0.00625, (0.9, 0.8)),
    "thor-spectral": (0.005, (0.8, 0.9)),  # ThorMuon, by its name in the raw data
    "muon": (0.0025, (0.95, 0.8)),
    "soap": (0.0005, (0.95, 0.8)),
}


@dataclass(frozen=True)
class Contest:
    """A batch size and the length of the training.

    Args:
        batch_size: Examples in a batch.
        parts: Parts that a batch is computed in.
        steps: Optimizer steps.
        eval_interval: Steps between evaluations. Tuning runs evaluate four times only, because an evaluation costs as
            much as twenty steps of batch 32.
    """

    batch_size: int
    parts: int
    steps: int
    eval_interval: int

    def __str__(self) -> str:
        return f"batch{self.batch_size}"


CONTESTS = (Contest(32, 1, 1000, 25), Contest(512, 16, 120, 5))


@dataclass(frozen=True)
class Setting:
    """An optimizer with what it is tuned over.

    Args:
        optimizer: A key of ``GRIDS``.
        lr: Learning rate.
        momentum: Momentum, or the first beta.
        adamw_lr: Of Muon: the learning rate of AdamW, for what is no hidden matrix.
    """

    optimizer: str
    lr: float
    momentum: float
    adamw_lr: float | None = None

    def __str__(self) -> str:
        adamw = "" if self.adamw_lr is None else f"-adamw{self.adamw_lr:g}"
        return f"{self.optimizer}-lr{self.lr:g}-momentum{self.momentum:g}{adamw}"

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer."""
        lr, momentum = self.lr, self.momentum
        match self.optimizer:
            case "thor":
                return THOR(model, lr=lr, momentum=momentum, damping=0.01, update_interval=20)
            case "thor-spectral":
                return ThorMuon(model, lr=lr, momentum=momentum, weight_decay=0.01)
            case "lamb":
                return LAMB(model, lr=lr, betas=(momentum, 0.999))
            case "adamw":
                return torch.optim.AdamW(model.parameters(), lr=lr, betas=(momentum, 0.99), weight_decay=0.01)
            case "muon":
                return MuonAdamW(
                    model,
                    lr=lr,
                    momentum=momentum,
                    weight_decay=0.01,
                    adamw_lr=self.adamw_lr,
                    adamw_embeddings=True,
                )
            case "soap":
                from pytorch_optimizer import SOAP  # the extra `bench`

                return SOAP(
                    model.parameters(),
                    lr=lr,
                    betas=(momentum, 0.95),
                    weight_decay=0.01,
                    precondition_frequency=10,
                    max_precondition_dim=2048,  # not the vocabulary's side, as its authors have it
                )
        raise ValueError(self.optimizer)


@cache
def open_task(contest: Contest, seed: int, corpus: Path) -> MaskedLM:
    """Open the task."""
    interval = contest.steps // 4 if seed == TUNING_SEED else contest.eval_interval
    words = [
        "data.name=corpus", f"data.root={corpus}", "data.text.length=64", f"seed={seed}",
        f"steps={contest.steps}", f"batch_size={contest.batch_size}", f"accumulation={contest.parts}",
        f"schedule.warmup_steps={round(WARM_UP * contest.steps)}", f"eval_interval={interval}",
        "targets=[]", "device=cpu",
    ]  # fmt: skip
    return MaskedLM(load_recipe("bert-tiny", words), torch.device("cpu"), print)


@dataclass(frozen=True)
class Training:
    """One run.

    Args:
        contest: Batch size and steps.
        setting: The optimizer.
        seed: Seed.
        corpus: The prepared corpus.
    """

    contest: Contest
    setting: Setting
    seed: int
    corpus: Path

    @property
    def key(self) -> str:
        """Name of its raw data."""
        return f"{self.contest}-{self.setting}-seed{self.seed}"

    def run(self) -> dict[str, Any]:
        """Train."""
        started = time.perf_counter()
        task = open_task(self.contest, self.seed, self.corpus)
        run = run_of(task.recipe, task, self.setting.make)
        record, failure = trained(run)
        return {
            **asdict(self.contest),
            **asdict(self.setting),
            "seed": self.seed,
            "failure": failure,
            "evaluations": evaluations_of(run, record),
            "held_out_loss": [round(score.metrics["loss"], 4) for score in record.scores],
            "nsp_accuracy": [round(score.metrics["nsp_accuracy"], 4) for score in record.scores],
            "loss": [round(point.loss, 4) for point in record.points],
            "seconds": round(time.perf_counter() - started, 1),
            "corpus": {"tokenizer": task.tokenizer_checksum, "vocab_size": len(task.tokenizer())},
            "machine": describe(),
        }

    def result(self) -> dict[str, Any]:
        """Return the raw data."""
        return STORE.read(self.key)

    def final(self) -> float:
        """Return the accuracy at the last step; 0 for a run that diverged."""
        return final_accuracy(self.result())


def search(contest: Contest, name: str, corpus: Path = CORPUS) -> Search[Training]:
    """Return the search for the best setting of an optimizer."""
    start, momenta = GRIDS[name]
    adamw_lr = search(contest, "adamw", corpus).best().setting.lr if name == "muon" else None
    settings = [Setting(name, start * 2**power, momentum, adamw_lr) for momentum in momenta for power in range(RATES)]
    return Search([Training(contest, setting, TUNING_SEED, corpus) for setting in settings], Training.final)


def main() -> None:
    """Run what is missing, print the tables and draw."""
    parser = script.parser(__doc__)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="the prepared corpus (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, choices=[contest.batch_size for contest in CONTESTS], help="one batch size alone"
    )
    options = parser.parse_args()
    if not options.table:
        for contest in CONTESTS:
            if options.batch not in (None, contest.batch_size):
                continue

            def searches(*names: str, contest: Contest = contest) -> list[Search[Training]]:
                return [search(contest, name, options.corpus) for name in names or GRIDS]

            before_muon = partial(searches, *(name for name in GRIDS if name != "muon"))  # it needs AdamW's best
            script.measure(STORE, [stages(before_muon)[0], *stages(searches)], options.workers)
    from bert_report import draw, tables

    print(tables())
    draw()


if __name__ == "__main__":
    main()
