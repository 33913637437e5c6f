"""nanoGPT's example for a CPU: its own network, batches and evaluation, as a problem.

`model.py` and `config/train_shakespeare_char.py` of karpathy/nanoGPT are read from build/nanogpt,
and tinyshakespeare of karpathy/char-rnn from build/shakespeare. The sizes are those of nanoGPT's
README ("I only have a macbook"), with 50 batches of validation text in place of 20.
"""

from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import nanogpt
from benchmarks.gpu.nanogpt import CODE, TEXT, Example
from benchmarks.suite_problems import Batch, Problem
from torch_thor.errors import require

WHERE = {  # what is read from others, and where it comes from
    CODE / "model.py": "model.py of karpathy/nanoGPT",
    CODE / "train_shakespeare_char.py": "config/train_shakespeare_char.py of karpathy/nanoGPT",
    TEXT: "data/tinyshakespeare/input.txt of karpathy/char-rnn",
}
SIZES: dict[str, float] = {"block_size": 64, "batch_size": 12, "n_layer": 4, "n_head": 4}
SIZES |= {"n_embd": 128, "max_iters": 2000, "lr_decay_iters": 2000, "dropout": 0.0}
SIZES |= {"eval_iters": 50}


@cache
def example() -> Example:
    """Return the example, read once in a process."""
    for file, what in WHERE.items():
        require(file.is_file(), f"{file} is missing: save {what} there")
    return Example(CODE, TEXT, torch.device("cpu"), SIZES)


def network() -> nn.Module:
    """Return the network."""
    with redirect_stdout(None):  # nanoGPT prints its numbers of parameters
        return example().network()


def batches(size: int, seed: int) -> Iterator[Batch]:
    """Yield batches without end; their size is the example's."""
    del size
    own, generator = example(), torch.Generator().manual_seed(seed)
    while True:
        yield own.batch(own.train_text, generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    return model(*batch)[1]


def adamw(model: Any, lr: float) -> torch.optim.Optimizer:
    """Return nanoGPT's own AdamW."""
    with redirect_stdout(None):
        return nanogpt.adamw(model, example().config, lr, "cpu")


NANOGPT = Problem(
    "nanoGPT's CPU example", "validation loss", False, 2000, 12, network, batches,
    lambda half: iter(example().held_out), loss,
    lambda model, batch: loss(model, batch).detach()[None],
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "nanogpt",
)  # fmt: skip
