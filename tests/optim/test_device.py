"""Nothing waits for an accelerator: counted on the pretend accelerator of `tests/pretend.py`.

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

# The pretend accelerator leans on a part of torch that ends the process in 2.9.
pytestmark = pytest.mark.skipif(torch.__version__ < "2.14", reason="made for torch 2.14")

INTERVAL = 4


class Net(nn.Module):
    """Layers of most kinds, several of one shape, and convolutions with channels last."""

    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Embedding(7, 12), nn.Parameter(torch.ones(60))
        # a bias before BatchNorm would have gradients of nothing but rounding
        image = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.image = image.to(memory_format=torch.channels_last)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4)
        self.body = nn.ModuleList(nn.Linear(60, 60) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(60), nn.Linear(60, 10)

    def forward(self, images, words):
        x = torch.cat([self.grouped(self.image(images)).flatten(1), self.words(words)], 1)
        x = x * self.scale
        for layer in self.body:
            x = x + layer(torch.tanh(self.norm(x)))
        return self.head(x)


def batches(count, dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
        yield images, *(torch.randint(7, (8,), generator=generator) for _ in range(2))


class Training:
    """A model and its optimizer, on the device or on the CPU."""

    def __init__(self, make, *, on_device=True, dtype=torch.float32, **options):
        torch.manual_seed(0)
        self.model = Net().to(dtype)
        self.put = pretend.Pretend if on_device else (lambda tensor: tensor)
        if on_device:
            pretend.moved(self.model)
        self.optimizer = make(self.model, **{"update_interval": INTERVAL, **options})
        self.batches = batches(100, dtype)

    def batch(self):
        return list(map(self.put, next(self.batches)))

    def backward(self, batch):
        images, words, labels = batch
        nn.functional.cross_entropy(self.model(images, words), labels).backward()

    def waits(self, times=1, clip=None):
        """Where each of some steps waits, from backward pass to zero_grad()."""
        found = []
        for _ in range(times):
            batch = self.batch()
            with pretend.recorded() as record:
                self.backward(batch)
                if clip is not None:
                    clip(self.model.parameters())
                self.optimizer.step()
                self.optimizer.zero_grad()
            found.append(record.synchronisations)
        return found

    def weights(self):
        return [pretend.raw(p).detach().clone() for p in self.model.parameters()]


OPTIMIZERS = {"THOR": THOR, "ThorMuon": ThorMuon}
OPTIONS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "no bound": {"max_update_ratio": None},
    "tight bound": {"max_update_ratio": 1e-4, "nesterov": True},
    "no momentum": {"momentum": 0.0},
    "split": {"split_dim": 16, "factor_decay": 0.3},
    "clip": {"kl_clip": 1e-3},
    "projections": {"row_splits": {"image.0": (3, 5), "body.0": 3}, "split_dim": 16},
    "average": {"anytime": True},
}
OTHERS = {("ThorMuon", "clip"), ("THOR", "projections"), ("THOR", "average")}
CASES = [case for case in itertools.product(OPTIMIZERS, OPTIONS) if case not in OTHERS]


def count_waits(label, name):
    training = Training(OPTIMIZERS[label], **OPTIONS[name])
    (first,) = training.waits()
    assert len(first) <= 3, first  # the weights are looked at
    # two rounds: what is kept between two refreshes is made again in the first step after a refresh
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
    training.waits()
    # accumulation
    training.backward(training.batch())
    assert training.waits() == [[]]
    # torch's clipping, before our step
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0)
    assert training.waits(2, clip=clip) == [[], []]
    # a layer is frozen, and trained again
    for frozen in (True, False):
        for parameter in training.model.body[1].parameters():
            parameter.requires_grad_(not frozen)
        assert training.waits(2)[1] == []
    check_gradients(training.optimizer)
    (checked,) = training.waits()
    assert len(checked) == 1, checked


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_steps_of_accumulation_clipping_and_frozen_layers_wait_for_nothing(label):
    pretend.run(other_ordinary_steps, label)


# ---- the same numbers as on a CPU ----------------------------------------------------------------


def difference_from_the_cpu(label, options, steps, *, same_polar=False):
    """The largest difference after some steps in float64, as a share of what they added."""
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
            training.waits(steps)
    finally:
        polar._polar = own
    triples = zip(before, *(training.weights() for training in trainings), strict=True)
    return max(float((a - b).norm() / (b - w).norm()) for w, a, b in triples)


@pytest.mark.parametrize(("label", "name"), CASES)
def test_steps_equal_the_steps_of_a_cpu(label, name):
    """With the same polar factors; six rounds of products differ from eigenvectors by 5e-3."""
    options = {"lr": 0.02, **OPTIONS[name]}
    assert pretend.run(difference_from_the_cpu, label, options, 9, same_polar=True) < 1e-10
    if label == "ThorMuon" and name != "projections":
        assert pretend.run(difference_from_the_cpu, label, options, 1) < 5e-3


# ---- factors that cannot be inverted -------------------------------------------------------------


def invert_with_retries():
    torch.manual_seed(0)
    samples = torch.randn(9, 6, 12, dtype=torch.float64)
    part = samples @ samples.mT / 12
    part[1] -= 3 * torch.eye(6)
    part[7] -= 50 * torch.eye(6)
    part[5, 0, 0] = math.nan
    damping = torch.full((9,), 0.3, dtype=torch.float64)
    expected, levels = invert_own([part.clone()], [damping])
    found, found_levels = invert_own([pretend.Pretend(part)], [pretend.Pretend(damping)])
    assert found_levels == levels == [3]
    torch.testing.assert_close(pretend.raw(found[0]), expected[0], equal_nan=True)


def test_blocks_that_are_not_positive_get_the_damping_and_inverses_of_a_cpu():
    pretend.run(invert_with_retries)


# ---- a device without float64 --------------------------------------------------------------------


def step_without_float64(label):
    """How much the curvature differs from a CPU's, with more patches than are taken."""
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


def kernels(label):
    """The number of kernels of an ordinary step of a small GPT-2, views not counted."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=512, n_positions=64)
    model = pretend.moved(GPT2LMHeadModel(config))
    ids = pretend.Pretend(torch.arange(64).view(2, 32))
    optimizer = OPTIMIZERS[label](model, update_interval=50)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        with pretend.recorded() as record:
            optimizer.step()
        optimizer.zero_grad()
    return record.kernels


@pytest.mark.parametrize(("label", "most"), [("THOR", 72), ("ThorMuon", 172)])
def test_a_step_has_few_kernels(label, most):
    assert 8 < pretend.run(kernels, label) <= most


# ---- the pretend device itself -------------------------------------------------------------------


def what_waits():
    x = pretend.Pretend(torch.eye(3) * 2)
    for call in (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x[x > 1],
        lambda: torch.ones(3).to("toy", non_blocking=True),
        lambda: torch.tensor([1.0], device="toy"),
        lambda: torch.linalg.cholesky(x),
    ):
        with pretend.recorded() as record:
            call()
        assert len(record.synchronisations) == 1
    with pretend.recorded() as record:
        torch._foreach_mul([x, x], 2.0)
        x.view(9).add_(1)
        torch.linalg.cholesky_ex(x)
    assert not record.synchronisations
    assert record.kernels == 3


def test_the_pretend_device_counts_what_waits():
    pretend.run(what_waits)
