"""A character language model of the language reference that is part of Python.

A loss term is a predicted character. A batch is (characters, next characters), (n, CONTEXT) each,
int64: windows with random starts, drawn anew for each batch. An epoch has as many windows as cover
the text once.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_thor.training.data.batches import batches_per_epoch, digest, held_out_keys, take
from torch_thor.training.data.small import SYMBOLS, load_characters
from torch_thor.training.models.small import CharTransformer
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.task import Batch, Loss, Metric, Task, Terms

CONTEXT = 64  # characters per window
EVALUATION_BATCH = 64  # windows per batch
SAMPLE = 100  # characters of a sample


class CharLM(Task):
    """The task of predicting the next character."""

    unit = "characters"
    metrics: Sequence[Metric] = (
        Metric("loss", "loss", "held-out loss", higher_is_better=False, primary=True),
        Metric(
            "perplexity", "perplexity", "perplexity", higher_is_better=False,
            # exp(700) is about the largest float
            derived=lambda means: math.exp(min(means["loss"], 700.0)),
        ),
    )  # fmt: skip

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        say: Callable[[str], None],
        *,
        train: bool = True,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.train, test = (codes.to(device) for codes in load_characters())
        self.test = windows(test, torch.arange(0, len(test) - CONTEXT - 1, CONTEXT, device=device))
        self.recipe, self.data = recipe, {"samples": len(self.train) // CONTEXT}
        self.steps_per_epoch = batches_per_epoch(self.data["samples"], recipe.batch_size)

    def model(self) -> nn.Module:
        """Build the network."""
        return CharTransformer(SYMBOLS, CONTEXT)

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Yield a process's training batches; all windows are functions of (seed, epoch, batch)."""
        size = self.recipe.batch_size
        per_epoch = batches_per_epoch(self.data["samples"], size, ranks.world)
        mine = slice(ranks.rank * size // ranks.world, (ranks.rank + 1) * size // ranks.world)
        for number in itertools.count(start):
            seed = digest(self.recipe.seed, *divmod(number, per_epoch))
            random = torch.Generator().manual_seed(seed)
            starts = torch.randint(len(self.train) - CONTEXT, (size,), generator=random)
            yield windows(self.train, starts[mine].to(self.train.device))

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return the evaluation batches of a process."""
        for indices, counts in held_out_keys(len(self.test[0]), EVALUATION_BATCH, ranks):
            yield take(self.test, indices), counts

    def terms(self, batch: Batch) -> Terms:
        """Count the predicted characters."""
        return Terms(batch[1].numel())

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Compute the mean cross-entropy of the next characters."""
        scores = net(batch[0]).flatten(0, 1)
        return Loss(cross_entropy(scores, batch[1].flatten()), scores)

    def measure(self, net: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sum of the cross-entropy of the next characters."""
        scores = net(batch[0]).flatten(0, 1)
        return {"loss": cross_entropy(scores, batch[1].flatten(), reduction="sum")}

    @torch.no_grad()
    def sample(self, net: nn.Module) -> str:
        """Continue the held-out text: characters are drawn by the squares of their chances."""
        codes, net, random = self.test[0][:1], net.eval(), torch.Generator().manual_seed(0)
        for _ in range(SAMPLE):
            chances = torch.softmax(2 * net(codes[:, -CONTEXT:])[:, -1].cpu(), -1)
            drawn = torch.multinomial(chances, 1, generator=random)
            codes = torch.cat([codes, drawn.to(codes.device)], 1)
        return " ".join("".join(map(chr, codes[0, CONTEXT:])).split())


def windows(codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Cut windows out of a text: the characters and the next characters, (N, CONTEXT) each."""
    rows = codes[starts[:, None] + torch.arange(CONTEXT + 1, device=codes.device)]
    return rows[:, :-1], rows[:, 1:]
