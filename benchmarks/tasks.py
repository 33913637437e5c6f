"""Three unlike tasks, small enough for a CPU: a convolutional classifier, a deep autoencoder, a small language model.

The classifier comes with batches of 128, 512, 1024 and 4096 images. Each is a network, its training batches and a
figure measured on data it is not trained on. A seed decides the initial weights and the order of the data, the same for
every optimizer. All run a fixed number of steps, and the learning rate falls linearly from its start to 0.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.data.in_memory import DataBundle, DataSpec, load_data
from torch_thor.training.data.python_text import SYMBOLS, characters, python_text, windows
from torch_thor.training.models.autoencoder import HIDDEN, deep_autoencoder
from torch_thor.training.models.char_transformer import CharTransformer
from torch_thor.training.models.classifiers import SmallResNet

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """One training.

    Args:
        title: what it is, for people.
        steps: optimizer steps of a run.
        eval_interval: steps between evaluations.
        higher: whether a higher figure is better.
        metric: name of the figure.
        build: makes the network, with torch's global random numbers.
        batches: yields batches without end, for a seed.
        loss: the training loss of a batch.
        evaluate: the figure, on data that is not trained on.
    """

    title: str
    steps: int
    eval_interval: int
    higher: bool
    metric: str
    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], float]


# ---- images ---------------------------------------------------------------------------------------------------------


@cache
def _fashion_mnist() -> DataBundle:
    return load_data(DataSpec("fashion-mnist"))


def _shuffled(inputs: Tensor, targets: Tensor, size: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(inputs), generator=generator).split(size):
            if len(chosen) == size:
                yield inputs[chosen], targets[chosen]


@cache
def _small_images() -> tuple[Tensor, Tensor]:
    """Return training and test images at half the resolution, 14 x 14: a quarter of the time."""
    data = _fashion_mnist()
    train, test = (functional.avg_pool2d(x, 2) for x in (data.train_images, data.test_images))
    return tuple(x.contiguous(memory_format=torch.channels_last) for x in (train, test))


def _resnet() -> nn.Module:
    return SmallResNet(1, 10, widths=(8, 16, 32)).to(memory_format=torch.channels_last)


def _accuracy(model: nn.Module) -> float:
    """Return the share of the first 5,000 test images that are classified rightly."""
    images, labels = _small_images()[1][:5000], _fashion_mnist().test_labels[:5000]
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True))
    return right / len(labels)


# ---- autoencoder ----------------------------------------------------------------------------------------------------


@cache
def _pixels() -> Batch:
    """Return training and held-out images as vectors in [0, 1]."""
    data = _fashion_mnist()
    low, high = data.train_images.min(), data.train_images.max()
    train, test = ((x.flatten(1) - low) / (high - low) for x in (data.train_images, data.test_images[:2000]))
    return train, test


def _pixel_batches(seed: int) -> Iterator[Batch]:
    train, _ = _pixels()
    return _shuffled(train, train, 128, seed)


def _reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy, summed over the pixels of an image."""
    pixels = functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="sum")
    return pixels / len(batch[0])


def _squared_error(model: nn.Module) -> float:
    """Return the mean squared error of a held-out image, summed over its pixels."""
    _, test = _pixels()
    return float((torch.sigmoid(model(test)) - test).square().sum(1).mean())


# ---- language model -------------------------------------------------------------------------------------------------

CONTEXT = 64


def text_checksum() -> str:
    """Return what tells one Python version's text from another's."""
    return hashlib.sha256(python_text().encode()).hexdigest()[:16]


_characters = cache(characters)


def _text_batches(seed: int) -> Iterator[Batch]:
    train, _ = _characters()
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(train, torch.randint(len(train) - CONTEXT, (16,), generator=generator), CONTEXT)


def _next_character(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _held_out_loss(model: nn.Module) -> float:
    _, held = _characters()
    starts = torch.arange(0, len(held) - CONTEXT - 1, CONTEXT)
    return float(_next_character(model, windows(held, starts, CONTEXT)))


def _classifier(size: int, steps: int, eval_interval: int) -> Task:
    return Task(
        f"small ResNet (8, 16, 32 wide) on Fashion-MNIST at 14 x 14, batch {size}",
        steps,
        eval_interval,
        True,
        "test accuracy",
        _resnet,
        lambda seed: _shuffled(_small_images()[0], _fashion_mnist().train_labels, size, seed),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        _accuracy,
    )


TASKS = {
    "classifier": _classifier(128, 312, 24),
    "classifier512": _classifier(512, 156, 12),
    "classifier1024": _classifier(1024, 116, 9),
    "classifier4096": _classifier(4096, 58, 4),
    "autoencoder": Task(
        f"autoencoder {'-'.join(map(str, (784, *HIDDEN, 784)))} on Fashion-MNIST, batch 128",
        400,
        16,
        False,
        "held-out squared error",
        lambda: deep_autoencoder(784),
        _pixel_batches,
        _reconstruction,
        _squared_error,
    ),
    "language": Task(
        "transformer (2 blocks, 64 wide, context 64) on characters, batch 16",
        300,
        12,
        False,
        "held-out loss",
        lambda: CharTransformer(SYMBOLS, CONTEXT),
        _text_batches,
        _next_character,
        _held_out_loss,
    ),
}


def train(
    task: Task,
    seed: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    share: float = 1.0,
    schedule: Callable[[float], float] = lambda progress: 1 - progress,
) -> dict:
    """Train once.

    Args:
        task: what to train.
        seed: of the weights and the data.
        make: makes the optimizer.
        share: length of the run and of its schedule, as a share of the task's steps.
        schedule: the factor of the learning rate, of the share of the run that is over.

    Returns:
        ``evaluations`` (step, figure) and ``loss`` (of every step); ``failure`` says where the loss was not finite.
    """
    steps = round(share * task.steps)
    torch.manual_seed(seed)
    model = task.build()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step / steps))
    batches = task.batches(seed)
    evaluations, losses, failure = [], [], None
    for step in range(1, steps + 1):
        loss = task.loss(model, next(batches))
        loss.backward()
        losses.append(round(loss.item(), 5))
        if not math.isfinite(losses[-1]) or losses[-1] > 1e4:
            failure = f"step {step}: loss {losses[-1]}"
            break
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % task.eval_interval == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                evaluations.append((step, round(task.evaluate(model), 5)))
            model.train()
    return {"evaluations": evaluations, "loss": losses, "failure": failure}
