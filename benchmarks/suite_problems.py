"""The problems of the suite, which train in seconds on one core, with data of Debian's packages.

What is held out is cut in two: learning rates are chosen by the figure on the first half, and the
tables report the figure on the second. A seed determines the initial weights and the order of the
data, alike for every optimizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor import adaptive_clip_grad_
from torch_thor.training.data.small import SYMBOLS, load_characters, load_images
from torch_thor.training.models.small import CharTransformer, SmallResNet, deep_autoencoder
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Data
from torch_thor.training.recipes import load_recipe
from torch_thor.training.tasks.masked_lm import MaskedLM

Batch = Any
CORPUS = Path("corpora/suite")
BERT = Path(__file__).with_name("suite_bert.json")  # 2 layers of 64
CONTEXT = 64  # characters
HELD_OUT_BATCH = 500


@dataclass(frozen=True)
class Problem:
    """A network, its data and its figure.

    Args:
        title: What it is, in the tables.
        metric: The figure that is reported, a mean over held-out samples.
        higher: Whether a higher figure is better.
        steps: Optimizer steps of a run.
        batch: Samples in a batch.
        model: Builds the network, from torch's global random generator.
        batches: Yields batches without end, from the batch size and the seed.
        held_out: Returns the batches of one half of what is held out: 0 to choose settings by, 1 to
            report.
        loss: Returns the training loss of a batch.
        score: Returns the figure of a batch for each of its samples, as one dimension.
        prepare: Called with the network between the backward pass and the optimizer's step.
        schedule: How the learning rate falls, by its name in training.py.
        evaluations: How often a run is evaluated whose seed is reported.
    """

    title: str
    metric: str
    higher: bool
    steps: int
    batch: int
    model: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    held_out: Callable[[int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    score: Callable[[nn.Module, Batch], Tensor]
    prepare: Callable[[nn.Module], object] = lambda model: None
    schedule: str = "linear"
    evaluations: int = 16


# ---- data ----------------------------------------------------------------------------------------


def shuffled(
    data: Callable[[], tuple[Tensor, ...]], size: int, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of shuffled samples, without end."""
    tensors, generator = data(), torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(tensors[0]), generator=generator).split(size):
            if len(rows) == size:
                yield tuple(tensor[rows] for tensor in tensors)


def halves(data: Callable[[], tuple[Tensor, ...]], half: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of every second sample."""
    yield from zip(*(tensor[half::2].split(HELD_OUT_BATCH) for tensor in data()), strict=True)


@cache
def images(train: bool, size: int = 14) -> tuple[Tensor, Tensor]:
    """Return Fashion-MNIST, at half its resolution unless asked for 28 pixels."""
    pixels, labels = load_images(Data(name="fashion-mnist"))[not train]
    return (functional.avg_pool2d(pixels, 2) if size == 14 else pixels), labels


@cache
def pixels(train: bool) -> tuple[Tensor]:
    """Return Fashion-MNIST as vectors in [0, 1]."""
    (both, _), (test, _) = load_images(Data(name="fashion-mnist"))
    low, high = both.min(), both.max()
    return (((both if train else test[:4000]).flatten(1) - low) / (high - low),)


@cache
def noisy(train: bool) -> tuple[Tensor, Tensor]:
    """Return Fashion-MNIST with normal noise of half its standard deviation, and without it."""
    clean = images(train, 28)[0][: None if train else 2000]
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(int(train)))
    return clean + 0.5 * noise, clean


@cache
def some_classes(train: bool, old: bool) -> tuple[Tensor, Tensor]:
    """Return the images of classes 0 to 4 (`old`), or of 5 to 9: there 2,000 are to train."""
    x, y = images(train, 28)
    rows, count = (y < 5) == old, None if old or not train else 2000
    return x[rows][:count], y[rows][:count]


@cache
def windows(train: bool) -> tuple[Tensor]:
    """Return windows of CONTEXT + 1 characters, which overlap only in the training set."""
    codes = load_characters()[not train]
    return (codes.unfold(0, CONTEXT + 1, 7 if train else CONTEXT),)


@cache
def places(train: bool) -> tuple[Tensor]:
    """Return points of the unit square."""
    generator = torch.Generator().manual_seed(int(train))
    return (torch.rand(20_000 if train else 4_000, 2, generator=generator),)


# ---- networks ------------------------------------------------------------------------------------


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) of three scales, which predicts the noise."""

    def __init__(self, widths: tuple[int, int, int] = (8, 16, 32)) -> None:
        super().__init__()
        a, b, c = widths
        self.down = nn.ModuleList([self.block(1, a), self.block(a, b), self.block(b, c)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(c, b, 2, 2), nn.ConvTranspose2d(b, a, 2, 2)])
        self.merge = nn.ModuleList([self.block(2 * b, b), self.block(2 * a, a)])
        self.head = nn.Conv2d(a, 1, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        """Return two convolutions with normalisation and SiLU."""
        layers = list[nn.Module]()
        for width in (inputs, outputs):
            layers.append(nn.Conv2d(width, outputs, 3, padding=1))
            layers += [nn.GroupNorm(4, outputs), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image without noise, (N, 1, H, W)."""
        kept = [self.down[0](x)]
        for level in (1, 2):
            kept.append(self.down[level](functional.max_pool2d(kept[-1], 2)))
        inner = kept[2]
        for up, merge, skip in zip(self.up, self.merge, (kept[1], kept[0]), strict=True):
            inner = merge(torch.cat([up(inner), skip], 1))
        return x - self.head(inner)


class LSTM(nn.Module):
    """An LSTM language model: embedding, two layers, linear head."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.symbols, self.head = nn.Embedding(SYMBOLS, 48), nn.Linear(width, SYMBOLS)
        self.lstm = nn.LSTM(48, width, num_layers=2, batch_first=True)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits, (N, CONTEXT, SYMBOLS)."""
        return self.head(self.lstm(self.symbols(codes))[0])


def vision_transformer(classes: int = 10) -> nn.Module:
    """Build timm's vision transformer, 3 blocks of 64, on patches of 7 x 7."""
    from timm.models.vision_transformer import VisionTransformer

    sizes: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 3}
    return VisionTransformer(img_size=28, patch_size=7, in_chans=1, num_classes=classes, **sizes)


def normalizer_free() -> nn.Module:
    """Build timm's normaliser-free ResNet (Brock et al. 2021), four stages of one block."""
    from timm.models.nfnet import NfCfg
    from timm.models.nfnet import NormFreeNet as Net

    shape: dict[str, Any] = {"depths": (1, 1, 1, 1), "channels": (32, 64, 96, 128)}
    stem: dict[str, Any] = {"stem_type": "3x3", "stem_chs": 16}
    return Net(NfCfg(**shape, **stem, num_features=128), num_classes=10, in_chans=1)


def pretrained() -> nn.Module:
    """Return the vision transformer after 200 steps of AdamW on classes 0 to 4, with a new head."""
    initial = torch.get_rng_state()
    model = vision_transformer(10)
    state = _pretrain()
    torch.set_rng_state(initial)
    model.load_state_dict(state)
    nn.init.trunc_normal_(model.get_parameter("head.weight"), std=0.02)
    return model


@cache
def _pretrain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batches = vision_transformer(10), shuffled(partial(some_classes, True, True), 128, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(200):
        x, y = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


# ---- losses and figures --------------------------------------------------------------------------


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of a batch of images."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def is_right(model: nn.Module, batch: Batch) -> Tensor:
    """Return 1 for images that are classified correctly, 0 for others."""
    return (model(batch[0]).argmax(1) == batch[1]).double()


def reconstruct(model: nn.Module, batch: Batch) -> Tensor:
    """Return the binary cross-entropy of the autoencoder, summed over the pixels."""
    (images,) = batch
    logits = model(images)
    loss = functional.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    return loss / len(images)


def reconstruction_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the squared error of the autoencoder, summed over the pixels."""
    return (torch.sigmoid(model(batch[0])) - batch[0]).square().sum(1).double()


def denoise(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of the images without noise."""
    return functional.mse_loss(model(batch[0]), batch[1])


def noise_left(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of each image without noise."""
    return (model(batch[0]) - batch[1]).square().flatten(1).mean(1).double()


def next_characters(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next characters."""
    logits = model(batch[0][:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


def per_window(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of each window."""
    logits = model(batch[0][:, :-1])
    losses = functional.cross_entropy(logits.mT, batch[0][:, 1:], reduction="none")
    return losses.mean(1).double()


def exact(points: Tensor) -> Tensor:
    """Return the solution of the Poisson equation: sin(2πx) sin(2πy)."""
    return torch.sin(2 * torch.pi * points).prod(1)


def residual(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of the physics-informed network: of the equation, and on the boundary (0)."""
    points = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    curvature = sum(
        torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i] for i in (0, 1)
    )
    inner = (curvature + 8 * torch.pi**2 * exact(batch[0])).square().mean() / (8 * torch.pi**2) ** 2
    side, t = torch.arange(len(batch[0])) % 4, batch[0][:, 0]
    end = (side % 2).float()
    edge = torch.stack([torch.where(side < 2, t, end), torch.where(side < 2, end, t)], 1)
    return inner + model(edge).square().mean()


def pde_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the squared error of the solution."""
    return (model(batch[0])[:, 0] - exact(batch[0])).square().double()


# ---- BERT: the application's task, read through the same functions -------------------------------


@cache
def bert(size: int, seed: int) -> MaskedLM:
    """Open the application's masked language model on the prepared corpus."""
    words = [f"model={BERT}", "data.name=corpus", f"data.root={CORPUS}", "data.text.length=32"]
    words += [f"batch_size={size}", f"seed={seed}"]
    return MaskedLM(load_recipe("bert-tiny", words), torch.device("cpu"), print)


def bert_held_out(half: int) -> Iterator[Batch]:
    """Yield every fourth batch of the held-out documents from `half` on."""
    for number, (batch, _) in enumerate(bert(32, 0).held_out(Ranks())):
        if number % 4 == half:
            yield batch


def masked_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the masked tokens of a batch, once for each of them."""
    task = bert(32, 0)
    count = task.terms(batch).number
    return (task.measure(model, batch)["loss"].double() / count).expand(count)


def _bert(size: int, steps: int) -> Problem:
    return Problem(
        f"BERT (2 layers of 64) on English text, batch {size}", "held-out loss on masked tokens",
        False, steps, size,
        lambda: bert(32, 0).model(), lambda size, seed: bert(size, seed).batches(Ranks(), 0),
        bert_held_out,
        lambda model, batch: bert(32, 0).loss(model, batch).mean, masked_tokens,
    )  # fmt: skip


def _of(data: Callable[[bool], tuple[Tensor, ...]], *parts: Any, **more: Any) -> dict[str, Any]:
    return {
        "batches": partial(shuffled, partial(data, True, *parts)),
        "held_out": partial(halves, partial(data, False, *parts)),
        **more,
    }


IMAGES = _of(images, loss=classify, score=is_right)
LARGE_IMAGES = _of(images, 28, loss=classify, score=is_right)
TEXT = _of(windows, loss=next_characters, score=per_window)
RESNET = Problem(
    "ResNet (8, 16, 32 wide) on Fashion-MNIST, 14 x 14, batch 128", "test accuracy", True, 312, 128,
    lambda: SmallResNet(1, 10, widths=(8, 16, 32)), **IMAGES,
)  # fmt: skip
AUTOENCODER = Problem(
    "autoencoder (8 layers) on Fashion-MNIST, batch 128", "held-out squared error", False, 400, 128,
    lambda: deep_autoencoder(784, (128, 64, 32, 12, 32, 64, 128)),
    **_of(pixels, loss=reconstruct, score=reconstruction_error),
)  # fmt: skip
CHARACTERS = Problem(
    "transformer (2 blocks of 64) on characters, batch 16", "held-out loss", False, 300, 16,
    lambda: CharTransformer(SYMBOLS, CONTEXT), **TEXT,
)  # fmt: skip


def _resnet(size: int, steps: int) -> Problem:
    return replace(RESNET, title=RESNET.title.replace("128", str(size)), batch=size, steps=steps)


def _longer(problem: Problem) -> Problem:
    return replace(problem, title=f"{problem.title}, twice as long", steps=2 * problem.steps)


PROBLEMS = {
    "resnet128": RESNET,
    "resnet512": _resnet(512, 156),
    "resnet1024": _resnet(1024, 116),
    "resnet4096": _resnet(4096, 30),
    "autoencoder": AUTOENCODER,
    "characters": CHARACTERS,
    "resnet128-long": _longer(RESNET),
    "autoencoder-long": _longer(AUTOENCODER),
    "characters-long": _longer(CHARACTERS),
    "bert32": _bert(32, 400),
    "bert512": _bert(512, 60),
    "vit": Problem(
        "ViT (3 blocks of 64) on Fashion-MNIST, batch 128", "test accuracy", True, 250, 128,
        vision_transformer, **LARGE_IMAGES,
    ),
    "unet": Problem(
        "U-Net (8, 16, 32 wide) that denoises Fashion-MNIST, batch 32", "held-out squared error",
        False, 200, 32,
        UNet, **_of(noisy, loss=denoise, score=noise_left),
    ),
    "pinn": Problem(
        "physics-informed network (3 hidden layers of 64), Poisson equation, batch 256",
        "held-out squared error",
        False, 400, 256,
        lambda: nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
            nn.Linear(64, 1)
        ),
        **_of(places, loss=residual, score=pde_error),
    ),
    "lstm": Problem(
        "LSTM (2 layers of 96) on characters, batch 16", "held-out loss", False, 300, 16,
        LSTM, **TEXT,
    ),
    "nf-resnet": Problem(
        "normaliser-free ResNet with adaptive clipping on Fashion-MNIST, 14 x 14, batch 128",
        "test accuracy", True,
        200, 128, normalizer_free, **IMAGES,
        prepare=lambda model: adaptive_clip_grad_(model.parameters(), 0.02),
    ),
    "fine-tuning": Problem(
        "ViT pretrained on five classes, fine-tuned on 2,000 images of five others, batch 64",
        "test accuracy", True,
        100, 64, pretrained, **_of(some_classes, False, loss=classify, score=is_right),
    ),
}  # fmt: skip
