"""Nothing waits for an accelerator: counted on the pretend one of `tests/pretend.py`.

A refresh reads twice: which layers take new factors, and whether a factorisation has failed.
ThorMuon's first step, which looks at the weights, reads once more, and check_gradients once.
"""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

import pretend
from torch_thor import THOR, ThorMuon, check_gradients
from torch_thor.curvature import polar
from torch_thor.curvature.inverse import invert_own
from torch_thor.training.models.small import BasicBlock

# The pretend accelerator leans on a part of torch that ends the process in 2.9.
pytestmark = pytest.mark.skipif(torch.__version__ < "2.14", reason="made for torch 2.14")

INTERVAL = 4


def narrow_resnet18():
    widths = [8, 8, 8, 16, 16, 32, 32, 64, 64]
    blocks = [BasicBlock(i, o, 1 if i == o else 2) for i, o in itertools.pairwise(widths)]
    stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Net(nn.Module):
    """A layer of most kinds, and several of one shape."""

    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Embedding(7, 12), nn.Parameter(torch.ones(60))
        # a bias before BatchNorm would have gradients of nothing but rounding
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.grouped = nn.Conv2d(8, 12, 3, groups=4)
        self.body = nn.ModuleList(nn.Linear(60, 60) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(60), nn.Linear(60, 10)

    def forward(self, images, words):
        x = torch.cat([self.grouped(self.image(images)).flatten(1), self.words(words)], 1)
        x = x * self.scale
        for layer in self.body:
            x = x + layer(torch.tanh(self.norm(x)))
        return self.head(x)


class Heads(nn.Module):
    """GPT-NeoX's attention, in whose fused weight heads take turns; a batch is a sequence."""

    def __init__(self):
        from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox

        super().__init__()
        sizes = {"hidden_size": 60, "num_attention_heads": 3, "attention_dropout": 0.0}
        config = gpt_neox.GPTNeoXConfig(**sizes, attn_implementation="eager")
        self.attention = gpt_neox.GPTNeoXAttention(config, layer_idx=0)

    def forward(self, x):
        angles = torch.ones_like(x[None, :, :4]), torch.zeros_like(x[None, :, :4])
        return self.attention(x[None], attention_mask=None, position_embeddings=angles)[0][0]


class SplitNet(Net):
    """Fused weights with outputs that are rows, columns, and rows in turns."""

    def __init__(self):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.body[1], self.body[2] = Conv1D(60, 60), Heads()


SPLITS = {"image.0": (3, 5), "body.0": 3, "body.1": (50, 10)}


class CopyNet(Net):
    """Weights whose matrices are copies: channels last, and a transposed convolution."""

    def __init__(self):
        super().__init__()
        up = nn.ConvTranspose2d(8, 8, 1, groups=2)
        self.image = nn.Sequential(*self.image, up).to(memory_format=torch.channels_last)


def batches(count, dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
        yield images, *(torch.randint(7, (8,), generator=generator) for _ in range(2))


class Training:
    """A model and its optimizer, on the device or on the CPU."""

    def __init__(self, make, *, on_device=True, dtype=torch.float32, **options):
        torch.manual_seed(0)
        self.model = options.pop("net", Net)().to(dtype)
        self.put = pretend.Pretend if on_device else (lambda tensor: tensor)
        if on_device:
            pretend.moved(self.model)
        self.optimizer = make(self.model, **{"update_interval": INTERVAL, **options})
        self.batches = batches(100, dtype)

    def batch(self):
        return map(self.put, next(self.batches))

    def backward(self, batch, scale=1.0):
        images, words, labels = batch
        (nn.functional.cross_entropy(self.model(images, words), labels) * scale).backward()

    def step(self, batch=None, clip=None):
        self.backward(batch or self.batch())
        if clip is not None:
            clip(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def waits(self, times=1, clip=None):
        """Where each of some steps waits, of backward pass to zero_grad; the batches are there."""
        found = []
        for _ in range(times):
            batch = list(self.batch())
            with pretend.recorded() as record:
                self.step(batch, clip)
            found.append(record.synchronisations)
        return found

    def weights(self):
        return [pretend.raw(p).detach().clone() for p in self.model.parameters()]


OPTIMIZERS = {"THOR": THOR, "ThorMuon": ThorMuon}
OPTIONS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "no bound": {"max_update_ratio": None},
    "tight bound": {"max_update_ratio": 1e-4},
    "no momentum": {"momentum": 0.0},
    "other Nesterov": {},
    "split": {"split_dim": 16, "factor_decay": 0.3},
    "clip": {"kl_clip": 1e-3},
    "projections": {"net": SplitNet, "row_splits": SPLITS, "split_dim": 16},
    # a tensor without memory of its own does not tell by an address what is a copy of it
    "copies": {"net": CopyNet},
    "average": {"anytime": True},
}
OTHERS = {("ThorMuon", "clip"), ("THOR", "projections"), ("THOR", "average")}
CASES = [case for case in itertools.product(OPTIMIZERS, OPTIONS) if case not in OTHERS]


def options_of(label, name):
    return {"nesterov": label == "THOR"} if name == "other Nesterov" else OPTIONS[name]


def count_waits(label, name):
    training = Training(OPTIMIZERS[label], **options_of(label, name))
    (first,) = training.waits()
    assert len(first) <= 3, first  # the weights are looked at
    # two rounds: what is kept between two refreshes is made again in the first step after one
    for _ in range(2):
        assert training.waits(INTERVAL - 1) == [[]] * (INTERVAL - 1)
        (refresh,) = training.waits()
        assert training.optimizer.last_refresh
        assert 1 <= len(refresh) <= 2, refresh
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert training.waits(INTERVAL - 1) == [[]] * (INTERVAL - 1), "after loading"


@pytest.mark.parametrize(("label", "name"), CASES)
def test_an_ordinary_step_waits_for_nothing_and_a_refresh_twice(label, name):
    pretend.run(count_waits, label, name)


def other_ordinary_steps(label):
    training = Training(OPTIMIZERS[label], update_interval=50)
    training.step()
    # accumulation
    training.backward(training.batch(), 0.5)
    training.backward(training.batch(), 0.5)
    with pretend.recorded() as record:
        training.optimizer.step()
    assert record.synchronisations == []
    # torch's clipping, before our step
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0)
    assert training.waits(2, clip=clip) == [[], []]
    # a layer without a gradient, and with one again
    for frozen in (True, False):
        for parameter in training.model.body[1].parameters():
            parameter.requires_grad_(not frozen)
        assert training.waits(2)[1] == []
    handle = check_gradients(training.optimizer)
    (checked,) = training.waits()
    assert len(checked) == 1, checked
    handle.remove()
    assert training.waits() == [[]]


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_steps_of_accumulation_clipping_and_frozen_layers_wait_for_nothing(label):
    pretend.run(other_ordinary_steps, label)


# ---- the same numbers as on a CPU ----------------------------------------------------------------


def compare_with_the_cpu(label, options, steps, *, same_polar=False):
    """The largest differences after some steps in float64: of a weight, and of what they added."""
    own = polar._polar
    if same_polar:  # the rounds of products that an accelerator takes, on the CPU too
        polar._polar = lambda parts: [
            polar._by_products(polar._with_largest_entry_1(part), part.dtype) for part in parts
        ]
    try:
        trainings = [
            Training(OPTIMIZERS[label], on_device=on_device, dtype=torch.float64, **options)
            for on_device in (True, False)
        ]
        before = trainings[1].weights()
        for training in trainings:
            for _ in range(steps):
                training.step()
    finally:
        polar._polar = own
    triples = list(zip(before, *(training.weights() for training in trainings), strict=True))
    of_weights = max(float((a - b).norm() / b.norm()) for _, a, b in triples)
    of_steps = max(float((a - b).norm() / (b - w).norm()) for w, a, b in triples)
    return of_weights, of_steps


@pytest.mark.parametrize(("label", "name"), CASES)
def test_steps_are_those_of_a_cpu(label, name):
    """With the same polar factors; six rounds of products differ from eigenvectors by 5e-3."""
    options = {"lr": 0.02, **options_of(label, name)}
    of_weights, _ = pretend.run(compare_with_the_cpu, label, options, 9, same_polar=True)
    assert of_weights < 1e-12
    if label == "ThorMuon" and name != "projections":
        _, of_steps = pretend.run(compare_with_the_cpu, label, options, 1)
        assert of_steps < 5e-3


# ---- factors that cannot be inverted -------------------------------------------------------------


def blocks(count, size):
    samples = torch.randn(count, size, 2 * size, dtype=torch.float64)
    return samples @ samples.mT / (2 * size)


def invert_with_retries():
    torch.manual_seed(0)
    parts = [blocks(5, 6), blocks(4, 6), torch.rand(7, 1, 1, dtype=torch.float64)]
    parts[0][1] -= 3 * torch.eye(6)
    parts[1][2] -= 50 * torch.eye(6)
    parts[1][0, 0, 0] = math.nan
    parts[2][3], parts[2][5] = -0.5, -90
    damping = [torch.full((len(part),), 0.3, dtype=torch.float64) for part in parts]
    expected, levels = invert_own([part.clone() for part in parts], damping)
    good = blocks(3, 6)
    with pretend.recorded() as record:
        invert_own([pretend.Pretend(good)], [pretend.Pretend(damping[0][:3])])
    assert len(record.synchronisations) == 1
    found, found_levels = invert_own(
        [pretend.Pretend(part.clone()) for part in parts],
        [pretend.Pretend(one.clone()) for one in damping],
    )
    assert found_levels == levels == [1, 3, 3]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(pretend.raw(one), other, equal_nan=True)


def test_blocks_that_are_not_positive_get_the_damping_and_inverses_of_a_cpu():
    pretend.run(invert_with_retries)


# ---- a device without float64 --------------------------------------------------------------------


def step_without_float64(label):
    """How much the curvature differs from that on a CPU, with more patches than are taken."""
    found, pretend.Pretend.has_float64 = [], False
    try:
        for put, move in ((pretend.Pretend, pretend.moved), (lambda x: x, lambda x: x)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(1296, 2))
            optimizer = OPTIMIZERS[label](move(model))
            model(put(torch.randn(8, 1, 18, 18))).square().mean().backward()
            optimizer.step()
            factors = [layer.factors() for layer in optimizer.curvature.values()]
            found.append([pretend.raw(f) for pair in factors for f in pair if f is not None])
    finally:
        pretend.Pretend.has_float64 = True
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_a_device_without_float64_has_the_curvature_of_a_cpu(label):
    """float64 is taken on the CPU, or not at all: MPS raises an error."""
    assert pretend.run(step_without_float64, label) < 1e-5


# ---- kernels -------------------------------------------------------------------------------------


def kernels(label, network):
    """The number of kernels of an ordinary step, views apart, and where it waits."""
    torch.manual_seed(0)
    if network == "GPT-2":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=512, n_positions=64)
        model = pretend.moved(GPT2LMHeadModel(config))
        ids = pretend.Pretend(torch.arange(64).view(2, 32))
        loss_of = partial(lambda: model(input_ids=ids, labels=ids).loss)
    else:
        # an eighth of the width, which has as many kernels and takes a thirtieth of the time
        model = pretend.moved(narrow_resnet18().to(memory_format=torch.contiguous_format))
        images, labels = (pretend.Pretend(x) for x in (torch.randn(4, 3, 32, 32), torch.arange(4)))
        loss_of = partial(lambda: nn.functional.cross_entropy(model(images), labels))
    optimizer = OPTIMIZERS[label](model, update_interval=50)
    for _ in range(3):
        loss_of().backward()
        with pretend.recorded() as record:
            optimizer.step()
        optimizer.zero_grad()
    return record.kernels, record.synchronisations


@pytest.mark.parametrize(
    ("label", "network", "most"),
    [
        ("THOR", "GPT-2", 72),
        ("THOR", "ResNet-18", 78),
        ("ThorMuon", "GPT-2", 172),
        ("ThorMuon", "ResNet-18", 479),
    ],
)
def test_a_step_has_few_kernels(label, network, most):
    count, waits = pretend.run(kernels, label, network)
    assert 8 < count <= most
    assert waits == []


# ---- the pretend device itself -------------------------------------------------------------------


def what_waits():
    x = pretend.Pretend(torch.eye(3) * 2)
    mask = pretend.Pretend(torch.tensor([True, False, True]))
    counts = pretend.Pretend(torch.tensor([1, 2]))
    pinned, host = torch.ones(3, 3), torch.ones(3)
    pinned.pretends_pinned = True
    waiting = {
        "item": lambda: x.sum().item(),
        "to the host": lambda: x.cpu(),
        "into the host": lambda: torch.empty(3, 3).copy_(x, non_blocking=True),
        "pageable": lambda: host.to("toy", non_blocking=True),
        "from numbers": lambda: torch.tensor([1.0], device="toy"),
        "mask": lambda: x[mask],
        "repeat": lambda: torch.repeat_interleave(counts),
        "cholesky": lambda: torch.linalg.cholesky(x),
    }
    free = {
        "product": lambda: x @ x,
        "pinned": lambda: pinned.to("toy", non_blocking=True),
        "into pinned": lambda: pinned.copy_(x, non_blocking=True),
        "cholesky_ex": lambda: torch.linalg.cholesky_ex(x),
        "index": lambda: x[counts],
    }
    for calls, expected in ((waiting, True), (free, False)):
        for name, call in calls.items():
            with pretend.recorded() as record:
                call()
            assert bool(record.synchronisations) == expected, (name, record.synchronisations)
    with pretend.recorded() as record:
        torch._foreach_mul([x, x], 2.0)
        x.view(9).add_(1)
    assert record.kernels == 2


def test_the_pretend_device_counts_what_waits():
    pretend.run(what_waits)
