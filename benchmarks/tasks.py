"""Three tasks that are small enough for a CPU: a convolutional classifier, a deep autoencoder, a language model.

The classifier is trained with batches of 128, 512, 1024 and 4096 images. The tasks and the training loop are those of
the application. This file defines the differences: smaller networks and images, the order of the batches, and what an
evaluation measures. A seed determines the initial weights and the order of the data, which are the same for every
optimizer. All runs have a fixed number of steps, and the learning rate decreases linearly to 0.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from torch_thor.training import (
    Batch,
    Callback,
    DivergedError,
    Metric,
    Run,
    RunConfig,
    ScheduleSpec,
    StepPoint,
    Task,
    primary,
)
from torch_thor.training import train as train_run
from torch_thor.training.data import (
    DataBundle,
    DataSpec,
    EvaluationOrder,
    MemoryLoader,
    Shard,
    Streams,
    TrainingOrder,
    TrainingStream,
    WindowLoader,
    WindowOrder,
    characters,
    load_data,
)
from torch_thor.training.data.python_text import python_text
from torch_thor.training.models import SmallResNet, deep_autoencoder
from torch_thor.training.models.autoencoder import HIDDEN
from torch_thor.training.tasks import Autoencoder, CharLM, ImageClassification
from torch_thor.training.tasks.autoencoder import MOST_HELD_OUT
from torch_thor.training.tasks.char_lm import CONTEXT

HIGHEST_LOSS = 1e4  # a run whose loss exceeds it has diverged

# ---- order of the batches -------------------------------------------------------------------------------------------


class OneShuffle(TrainingOrder):
    """Shuffled batches; one random generator, seeded once, draws the orders of all epochs one after the other."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """List the batches of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            start: batches to pass over.

        Yields:
            For each batch the numbers of its samples.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(epoch + 1):
            order = torch.randperm(self.count, generator=generator)
        for batch in range(start, self.batches):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()


class OneDraw(WindowOrder):
    """Windows that start anywhere; one random generator, seeded once, draws the batches of all epochs."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """List the batches of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            start: batches to pass over.

        Yields:
            For each batch where its windows start.
        """
        generator = torch.Generator().manual_seed(self.seed)
        passed = epoch * self.batches + start
        for batch in range((epoch + 1) * self.batches):
            starts = torch.randint(self.positions, (self.batch_size,), generator=generator)
            if batch >= passed:
                yield starts.tolist()


def _shuffled(train: Any, held_out: Any, evaluation_batch: int, config: RunConfig, shard: Shard) -> Streams:
    """Open data in memory, with the training batches in the order of `OneShuffle`."""
    order = OneShuffle(len(tree_leaves(train)[0]), config.batch_size, config.seed, shard)
    evaluation = EvaluationOrder(len(tree_leaves(held_out)[0]), evaluation_batch, shard)
    return Streams(TrainingStream(MemoryLoader(train, order), order), MemoryLoader(held_out, evaluation))


# ---- tasks ----------------------------------------------------------------------------------------------------------


class SmallClassifier(ImageClassification):
    """A small ResNet on Fashion-MNIST at half the resolution; evaluated on the first 5,000 test images."""

    def build_model(self) -> nn.Module:
        """Build the network.

        Returns:
            A residual network 8, 16 and 32 channels wide.
        """
        return SmallResNet(1, 10, widths=(8, 16, 32)).to(memory_format=torch.channels_last)

    def open_data(self, shard: Shard) -> Streams:
        """Open the images from the beginning.

        Args:
            shard: which rank of how many.

        Returns:
            Training batches and evaluation batches.
        """
        data = self.data
        assert isinstance(data, DataBundle)
        train, test = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
        return _shuffled(train, test, 500, self.config, shard)


class DeepAutoencoder(Autoencoder):
    """The application's autoencoder, with hidden layers of choice.

    Args:
        train: images to train on, ``(N, pixels)``.
        held_out: images to evaluate on, ``(M, pixels)``.
        config: batch size and seed.
        hidden: widths of the hidden layers.
    """

    def __init__(self, train: Tensor, held_out: Tensor, config: RunConfig, hidden: tuple[int, ...]) -> None:
        super().__init__(train, held_out, config)
        self.hidden = hidden

    def build_model(self) -> nn.Module:
        """Build the network.

        Returns:
            The autoencoder.
        """
        return deep_autoencoder(self.train.shape[1], self.hidden)

    def open_data(self, shard: Shard) -> Streams:
        """Open the images from the beginning.

        Args:
            shard: which rank of how many.

        Returns:
            Training batches, and one batch of all held-out images.
        """
        return _shuffled(self.train, self.held_out, len(self.held_out), self.config, shard)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Measure the reconstruction.

        Args:
            model: the network.
            batch: all held-out images.

        Returns:
            Loss and squared error, summed over images and pixels. The error's mean is rounded to float32 before it is
            summed, as in all results recorded so far.
        """
        logits = model(batch)
        return {
            "loss": functional.binary_cross_entropy_with_logits(logits, batch, reduction="sum"),
            "squared_error": (torch.sigmoid(logits) - batch).square().sum(1).mean().double() * len(batch),
        }


class Characters(CharLM):
    """The application's language model, evaluated on the whole held-out text at once."""

    def open_data(self, shard: Shard) -> Streams:
        """Open the text from the beginning.

        Args:
            shard: which rank of how many.

        Returns:
            Training batches, and one batch of all held-out windows.
        """
        config = self.config
        order = OneDraw(
            len(self.train) // CONTEXT, config.batch_size, config.seed, shard, positions=len(self.train) - CONTEXT
        )
        evaluation = EvaluationOrder(len(self.held_out[0]), len(self.held_out[0]), shard)
        train = WindowLoader(self.train, CONTEXT, order)
        return Streams(TrainingStream(train, order), MemoryLoader(self.held_out, evaluation))

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Measure the predictions.

        Args:
            model: the network.
            batch: all held-out windows.

        Returns:
            The loss, summed over characters. Its mean is rounded to float32 before it is summed, as in all results
            recorded so far.
        """
        return {"loss": self.loss(model, batch).mean.double() * self.terms(batch).number}


def text_checksum() -> str:
    """Return what tells one Python version's text from another's."""
    return hashlib.sha256(python_text().encode()).hexdigest()[:16]


_characters = cache(characters)


@cache
def _small_images() -> DataBundle:
    """Return Fashion-MNIST at half the resolution, 14 x 14: a quarter of the time."""
    data = load_data(DataSpec("fashion-mnist"))
    train, test = (
        functional.avg_pool2d(images, 2).contiguous(memory_format=torch.channels_last)
        for images in (data.train_images, data.test_images)
    )
    return DataBundle(train, data.train_labels, test[:5000], data.test_labels[:5000], data.classes)


@cache
def _pixels() -> tuple[Tensor, Tensor]:
    """Return training and held-out images as vectors in [0, 1]."""
    data = load_data(DataSpec("fashion-mnist"))
    low, high = data.train_images.min(), data.train_images.max()
    train, held_out = (
        (images.flatten(1) - low) / (high - low) for images in (data.train_images, data.test_images[:MOST_HELD_OUT])
    )
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
        open: makes the task, for a configuration.
    """

    title: str
    steps: int
    eval_interval: int
    batch_size: int
    metric: str
    measured: Metric
    open: Callable[[RunConfig], Task]

    @property
    def higher(self) -> bool:
        """Whether a higher figure is better."""
        return self.measured.higher_is_better

    def config(self, seed: int, share: float = 1.0) -> RunConfig:
        """Return what the loop needs to know.

        Args:
            seed: of the weights and the data.
            share: length of the run and of its schedule, as a share of `steps`.

        Returns:
            The configuration.
        """
        return RunConfig(
            steps=round(share * self.steps),
            batch_size=self.batch_size,
            seed=seed,
            eval_interval=self.eval_interval,
            schedule=ScheduleSpec("linear"),
            device="cpu",
        )


def _classifier(batch_size: int, steps: int, eval_interval: int) -> Benchmark:
    return Benchmark(
        f"small ResNet (8, 16, 32 wide) on Fashion-MNIST at 14 x 14, batch {batch_size}",
        steps,
        eval_interval,
        batch_size,
        "test accuracy",
        primary(SmallClassifier.METRICS),
        lambda config: SmallClassifier(_small_images(), config),
    )


def autoencoder(hidden: tuple[int, ...], steps: int, eval_interval: int, batch_size: int) -> Benchmark:
    """Describe the training of an autoencoder of Fashion-MNIST.

    Args:
        hidden: widths of its hidden layers.
        steps: optimizer steps of a run.
        eval_interval: steps between evaluations.
        batch_size: images in a batch.

    Returns:
        The benchmark.
    """
    return Benchmark(
        f"autoencoder {'-'.join(map(str, (784, *hidden, 784)))} on Fashion-MNIST, batch {batch_size}",
        steps,
        eval_interval,
        batch_size,
        "held-out squared error",
        primary(DeepAutoencoder.METRICS),
        lambda config: DeepAutoencoder(*_pixels(), config, hidden),
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
        primary(Characters.METRICS),
        lambda config: Characters(*_characters(), config),
    ),
}


class _EndDiverged(Callback):
    """Ends a run whose loss says that it will not come back."""

    def after_step(self, run: Run, point: StepPoint) -> None:
        if point.loss > HIGHEST_LOSS:
            raise DivergedError(f"step {point.step}: loss {point.loss}")


def train(
    benchmark: Benchmark, seed: int, make: Callable[[nn.Module], torch.optim.Optimizer], share: float = 1.0
) -> dict[str, Any]:
    """Train once.

    Args:
        benchmark: what to train.
        seed: of the weights and the data.
        make: makes the optimizer.
        share: length of the run and of its schedule, as a share of the benchmark's steps.

    Returns:
        ``evaluations`` (step, figure) and ``loss`` (of every step); ``failure`` says where the training diverged.
    """
    run = new_run(benchmark, seed, make, share)
    failure = None
    try:
        train_run(run, [_EndDiverged()])
    except DivergedError as error:
        failure = str(error)
    return {
        "evaluations": [(point.step, round(point.value, 5)) for point in run.record.evaluations],
        "loss": [round(point.loss, 5) for point in run.record.steps],
        "failure": failure,
    }


def new_run(
    benchmark: Benchmark, seed: int, make: Callable[[nn.Module], torch.optim.Optimizer], share: float = 1.0
) -> Run:
    """Prepare a training.

    Args:
        benchmark: what to train.
        seed: of the weights and the data.
        make: makes the optimizer.
        share: length of the run and of its schedule, as a share of the benchmark's steps.

    Returns:
        The training, before its first step.
    """
    config = benchmark.config(seed, share)
    task = benchmark.open(config)
    torch.manual_seed(seed)
    model = task.build_model()
    return Run(model, make(model), task, config)
