"""Three tasks that are small enough for a CPU: a convolutional classifier, a deep autoencoder, a language model.

The classifier is trained with batches of 128, 512, 1024 and 4096 images. The tasks and the training loop are those of
the application. This file defines the differences: smaller networks and images, the order of the batches, and what an
evaluation measures. A seed determines the initial weights and the order of the data, which are the same for every
optimizer. All runs have a fixed number of steps, and the learning rate decreases linearly to 0.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.bench import evaluations_of, run_of, trained
from torch_thor.training import Batch, DivergedError, Metric, Observer, Point, Ranks, Recipe, Run, Task, primary
from torch_thor.training.data.batches import held_out_keys, take
from torch_thor.training.data.small import load_images, python_text
from torch_thor.training.models.small import SmallResNet, deep_autoencoder
from torch_thor.training.recipe import Data, Schedule
from torch_thor.training.tasks.autoencoder import MOST_HELD_OUT, Autoencoder
from torch_thor.training.tasks.char_lm import CONTEXT, CharLM, windows
from torch_thor.training.tasks.images import ImageClassification

HIGHEST_LOSS = 1e4  # a run whose loss exceeds it has diverged
HIDDEN = (128, 64, 32, 12, 32, 64, 128)  # widths of the application's autoencoder

# ---- order of the batches -------------------------------------------------------------------------------------------


def one_shuffle(count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield the samples of shuffled batches; one random generator draws the orders of all epochs."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % batch_size].split(batch_size)


def one_draw(positions: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield the starts of windows that start anywhere; one random generator draws all batches."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(positions, (batch_size,), generator=generator)


class Shuffled:
    """A task on data in memory, with batches in the order of `one_shuffle`. Every process has the whole batch."""

    recipe: Recipe
    train: Any
    test: Any
    samples: int
    evaluation_batch: int

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches."""
        order = one_shuffle(self.samples, self.recipe.batch_size, self.recipe.seed)
        return (take(self.train, rows.tolist()) for rows in itertools.islice(order, start, None))

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return the evaluation batches of a process."""
        count = len(self.test[0]) if isinstance(self.test, tuple) else len(self.test)
        keys = held_out_keys(count, self.evaluation_batch, ranks)
        return ((take(self.test, indices), counts) for indices, counts in keys)


# ---- tasks ----------------------------------------------------------------------------------------------------------


class SmallClassifier(Shuffled, ImageClassification):
    """A small ResNet on Fashion-MNIST at half the resolution; evaluated on the first 5,000 test images."""

    evaluation_batch = 500

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, (self.train, self.test) = recipe, _small_images()
        self.samples = len(self.train[1])
        self.steps_per_epoch = self.samples // recipe.batch_size

    def model(self) -> nn.Module:
        """Build a residual network 8, 16 and 32 channels wide."""
        return SmallResNet(1, 10, widths=(8, 16, 32)).to(memory_format=torch.channels_last)


class DeepAutoencoder(Shuffled, Autoencoder):
    """The application's autoencoder with hidden layers of choice, evaluated on all held-out images at once."""

    def __init__(self, recipe: Recipe, hidden: tuple[int, ...]) -> None:
        self.recipe, self.hidden, (self.train, self.test) = recipe, hidden, _pixels()
        self.samples, self.evaluation_batch = len(self.train), len(self.test)
        self.steps_per_epoch = self.samples // recipe.batch_size

    def model(self) -> nn.Module:
        """Build the autoencoder."""
        return deep_autoencoder(self.train.shape[1], self.hidden)

    def measure(self, net: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Measure the reconstruction; the mean error is rounded to float32, as in all results recorded so far."""
        logits = net(batch)
        return {
            "loss": functional.binary_cross_entropy_with_logits(logits, batch, reduction="sum"),
            "squared_error": (torch.sigmoid(logits) - batch).square().sum(1).mean().double() * len(batch),
        }


class Characters(CharLM):
    """The application's language model, evaluated on the whole held-out text at once."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, torch.device("cpu"), print)

    def batches(self, ranks: Ranks, start: int) -> Iterator[Batch]:
        """Return the training batches, which every process has whole."""
        starts = one_draw(len(self.train) - CONTEXT, self.recipe.batch_size, self.recipe.seed)
        return (windows(self.train, own) for own in itertools.islice(starts, start, None))

    def held_out(self, ranks: Ranks) -> Iterable[tuple[Batch, bool]]:
        """Return one batch of all held-out windows."""
        return [(self.test, ranks.first)]

    def measure(self, net: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Measure the predictions; the mean loss is rounded to float32, as in all results recorded so far."""
        return {"loss": self.loss(net, batch).mean.double() * self.terms(batch).number}


def text_checksum() -> str:
    """Return what tells one Python version's text from another's."""
    return hashlib.sha256(python_text().encode()).hexdigest()[:16]


@cache
def _small_images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return Fashion-MNIST at half the resolution, 14 x 14: a quarter of the time."""
    (train, labels), (test, test_labels) = load_images(Data(name="fashion-mnist"))
    train, test = (
        functional.avg_pool2d(images, 2).contiguous(memory_format=torch.channels_last) for images in (train, test)
    )
    return (train, labels), (test[:5000], test_labels[:5000])


@cache
def _pixels() -> tuple[Tensor, Tensor]:
    """Return training and held-out images as vectors in [0, 1]."""
    (images, _), (test, _) = load_images(Data(name="fashion-mnist"))
    low, high = images.min(), images.max()
    train, held_out = ((x.flatten(1) - low) / (high - low) for x in (images, test[:MOST_HELD_OUT]))
    return train, held_out


# ---- benchmarks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """A task with the length of its training.

    Args:
        title: what it is, for people.
        steps: optimizer steps of a run.
        eval_interval: steps between evaluations.
        batch_size: samples in a batch.
        metric: name of the task's primary metric, for people.
        measured: that metric.
        open: makes the task of a recipe.
    """

    title: str
    steps: int
    eval_interval: int
    batch_size: int
    metric: str
    measured: Metric
    open: Callable[[Recipe], Task]

    @property
    def higher(self) -> bool:
        """Whether a higher figure is better."""
        return self.measured.higher_is_better

    def recipe(self, seed: int, share: float = 1.0) -> Recipe:
        """Return what the loop needs to know."""
        return Recipe(
            steps=round(share * self.steps),
            batch_size=self.batch_size,
            seed=seed,
            eval_interval=self.eval_interval,
            schedule=Schedule(kind="linear"),
            device="cpu",
        )


def _classifier(batch_size: int, steps: int, eval_interval: int) -> Benchmark:
    return Benchmark(
        f"small ResNet (8, 16, 32 wide) on Fashion-MNIST at 14 x 14, batch {batch_size}",
        steps,
        eval_interval,
        batch_size,
        "test accuracy",
        primary(SmallClassifier.metrics),
        SmallClassifier,
    )


def autoencoder(hidden: tuple[int, ...], steps: int, eval_interval: int, batch_size: int) -> Benchmark:
    """Describe the training of an autoencoder of Fashion-MNIST."""
    return Benchmark(
        f"autoencoder {'-'.join(map(str, (784, *hidden, 784)))} on Fashion-MNIST, batch {batch_size}",
        steps,
        eval_interval,
        batch_size,
        "held-out squared error",
        primary(DeepAutoencoder.metrics),
        lambda recipe: DeepAutoencoder(recipe, hidden),
    )


TASKS = {
    "classifier": _classifier(128, 312, 24),
    "classifier512": _classifier(512, 156, 12),
    "classifier1024": _classifier(1024, 116, 9),
    "classifier4096": _classifier(4096, 58, 4),
    "autoencoder": autoencoder(HIDDEN, 400, 16, 128),
    "language": Benchmark(
        "transformer (2 blocks, 64 wide, context 64) on characters, batch 16",
        300,
        12,
        16,
        "held-out loss",
        primary(Characters.metrics),
        Characters,
    ),
}


class _EndDiverged(Observer):
    """Ends a run whose loss says that it will not come back."""

    def step(self, run: Run, point: Point) -> None:
        if point.loss > HIGHEST_LOSS:
            raise DivergedError(f"step {point.step}: loss {point.loss}")


def train(
    benchmark: Benchmark, seed: int, make: Callable[[nn.Module], torch.optim.Optimizer], share: float = 1.0
) -> dict[str, Any]:
    """Train once."""
    run = new_run(benchmark, seed, make, share)
    record, failure = trained(run, [_EndDiverged()])
    return {
        "evaluations": evaluations_of(run, record),
        "loss": [round(point.loss, 5) for point in record.points],
        "failure": failure,
    }


def new_run(
    benchmark: Benchmark, seed: int, make: Callable[[nn.Module], torch.optim.Optimizer], share: float = 1.0
) -> Run:
    """Prepare a training."""
    recipe = benchmark.recipe(seed, share)
    return run_of(recipe, benchmark.open(recipe), make)
