"""All problems, by name: those of the suite, of the fine-tuning, and nanoGPT's CPU example."""

from collections.abc import Iterator
from contextlib import redirect_stdout

import torch
from torch import Tensor, nn

from benchmarks import finetuning_problems, nanogpt, suite_problems
from benchmarks.suite_problems import Batch, Problem


def _network() -> nn.Module:
    with redirect_stdout(None):  # nanoGPT prints its numbers of parameters
        model: nn.Module = nanogpt.example().network()
    return model


def _batches(size: int, seed: int) -> Iterator[Batch]:
    own, generator = nanogpt.example(), torch.Generator().manual_seed(seed)
    while True:
        yield own.batch(own.train_text, generator)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(*batch)[1]
    return loss


NANOGPT = Problem(
    "nanoGPT's CPU example", "validation loss", False, 2000, 12, _network, _batches,
    lambda half: iter(nanogpt.example().held_out), _loss,
    lambda model, batch: _loss(model, batch).detach()[None],
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "nanogpt",
)  # fmt: skip
PROBLEMS: dict[str, Problem] = {
    **suite_problems.PROBLEMS,
    **finetuning_problems.PROBLEMS,
    **finetuning_problems.UNSEEN,
    "nanogpt": NANOGPT,
}
