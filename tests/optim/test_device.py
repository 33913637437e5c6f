"""Nothing waits for an accelerator: counted on the pretend one of `tests/pretend.py`.

An ordinary step reads nothing from the device, and a refresh twice: once to decide which layers
take new factors, with the check of the gradients, and once to learn whether a factorisation has
failed. Others read more. A `GradScaler` reads its own flag in every step. With
`nonfinite="skip"`, and in THOR's first step, which judges the scale of the loss, a refresh reads
once more. Where several processes decide together, or rows are divided among them (DTensor), each
step reads the norms of the gradients first, as on a CPU: what one process finds must be sent to
the others. A learning rate that is a tensor on the device is read in every step.
"""

import copy
import gc
import itertools
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import pretend
from benchmarks.resnet18 import resnet18 as narrow_resnet18
from torch_thor import THOR, ThorMuon, split_rows
from torch_thor.curvature import polar
from torch_thor.curvature.inverse import invert_own

# The pretend accelerator leans on a part of torch that ends the process in 2.9.
pytestmark = pytest.mark.skipif(torch.__version__ < "2.14", reason="made for torch 2.14")

INTERVAL = 4


class Net(nn.Module):
    """A layer of most kinds, and several of one shape."""

    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Embedding(7, 12), nn.Parameter(torch.ones(60))
        # a bias before BatchNorm would have gradients of rounding alone
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
        for layer, sizes in (self.image[0], (3, 5)), (self.body[0], 3), (self.body[1], (50, 10)):
            split_rows(layer, sizes)


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
        nonfinite = options.pop("nonfinite", "raise")
        self.optimizer = make(self.model, **{"update_interval": INTERVAL, **options})
        self.optimizer.nonfinite = nonfinite
        self.batches = batches(100, dtype)

    def backward(self, scale=1.0):
        images, words, labels = map(self.put, next(self.batches))
        loss = nn.functional.cross_entropy(self.model(images, words), labels)
        (loss * scale).backward()
        return float(pretend.raw(loss.detach()))

    def step(self):
        """Take a step; return the loss."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def waits(self, times=1, clip=None):
        """Where each of some steps waits, of backward pass to zero_grad; the batches are there."""
        found = []
        for _ in range(times):
            images, words, labels = map(self.put, next(self.batches))
            with pretend.recorded() as record:
                nn.functional.cross_entropy(self.model(images, words), labels).backward()
                if clip is not None:
                    clip(self.model.parameters())
                self.optimizer.step()
                self.optimizer.zero_grad()
            found.append(record.synchronisations)
        return found

    def contents(self):
        """Copies of all weights, of all tensors and numbers of the state, and of the counters."""
        groups = self.optimizer.param_groups
        states = [dict(self.optimizer.state.get(p, {})) for p in self.model.parameters()]
        due = [{k: of.pop(k) for k in [*of] if k.endswith("due")} for of in states]
        return [
            [pretend.raw(p).detach().clone() for p in self.model.parameters()],
            [
                {k: pretend.raw(v).clone() if torch.is_tensor(v) else v for k, v in of.items()}
                for of in states
            ],
            [due, [(group["step"], group["next_refresh"]) for group in groups]],
        ]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


OPTIMIZERS = {"THOR": THOR, "ThorMuon": ThorMuon}
OPTIONS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "no bound": {"max_update_ratio": None},
    "tight bound": {"max_update_ratio": 1e-4},
    "no momentum": {"momentum": 0.0},
    "other Nesterov": "nesterov",
    "split": {"split_dim": 16, "factor_decay": 0.3},
    "skip": {"nonfinite": "skip"},
    "clip": {"kl_clip": 1e-3},
}
CASES = [
    (label, name)
    for label, name in itertools.product(OPTIMIZERS, OPTIONS)
    if (label, name) != ("ThorMuon", "clip")
]


def cases_of(optimizer, *, fast):
    """The names of an optimizer's cases, all but a few of which are slow tests."""
    return [
        pytest.param(name, marks=[] if name in fast else pytest.mark.slow)
        for label, name in CASES
        if label == optimizer
    ]


def options_of(label, name):
    if OPTIONS[name] == "nesterov":
        return {"nesterov": label == "THOR"}
    return OPTIONS[name]


def count_waits(label, name, dtype):
    options = options_of(label, name)
    training = Training(OPTIMIZERS[label], dtype=dtype, **options)
    most = 3 if options.get("nonfinite") == "skip" else 2
    (first,) = training.waits()
    assert len(first) <= (3 if label == "THOR" else most), first
    # two rounds: what is kept between two refreshes is made again in the first step after one
    for _ in range(2):
        assert training.waits(INTERVAL - 1) == [[]] * (INTERVAL - 1)
        (refresh,) = training.waits()
        assert training.optimizer.last_refresh
        assert 1 <= len(refresh) <= most, refresh
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert training.waits(INTERVAL - 1) == [[]] * (INTERVAL - 1), "after loading"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)],
    ids=["float32", "float64"],
)
@pytest.mark.parametrize(("label", "name"), CASES)
def test_an_ordinary_step_waits_for_nothing_and_a_refresh_twice(label, name, dtype):
    pretend.run(count_waits, label, name, dtype)


def waits_with_projections():
    training = Training(OPTIMIZERS["ThorMuon"], net=SplitNet)
    training.waits()
    return training.waits(INTERVAL)


def test_projections_of_fused_weights_make_no_step_wait():
    *ordinary, refresh = pretend.run(waits_with_projections)
    assert ordinary == [[]] * (INTERVAL - 1)
    assert 1 <= len(refresh) <= 2, refresh


def other_ordinary_steps(label):
    training = Training(OPTIMIZERS[label], update_interval=50)
    training.step()
    # accumulation
    training.backward(0.5)
    training.backward(0.5)
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


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_steps_of_accumulation_clipping_and_frozen_layers_wait_for_nothing(label):
    pretend.run(other_ordinary_steps, label)


def count_waits_of_a_scaler(label):
    """What `scaler.step(optimizer)` makes our step read, once the gradients are scaled."""
    training = Training(OPTIMIZERS[label], update_interval=50)
    training.step()
    training.backward(4.0)
    optimizer = training.optimizer
    optimizer.grad_scale = pretend.Pretend(torch.tensor(4.0))
    optimizer.found_inf = pretend.Pretend(torch.tensor(0.0))
    with pretend.recorded() as record:
        optimizer.step()
    return record.synchronisations


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_a_gradient_scaler_costs_one(label):
    found = pretend.run(count_waits_of_a_scaler, label)
    assert len(found) == 1, found


# ---- gradients that are not finite ---------------------------------------------------------------


def bad_step(training):
    """A step with NaN in one gradient; nothing changes but the counters, until it is known."""
    training.backward()
    pretend.raw(training.model.body[1].weight.grad)[3, 4] = math.nan
    before = training.contents()
    with pretend.recorded() as record:
        training.optimizer.step()
    training.optimizer.zero_grad()
    after = training.contents()
    same(after[:2], before[:2])
    return record.synchronisations


def nan_is_raised_in_the_next_step(label, at):
    training, twin = (Training(OPTIMIZERS[label]) for _ in range(2))
    for one in (training, twin):
        for _ in range(at):
            one.step()
    assert bad_step(training) == []
    next(twin.batches)
    training.backward()
    next(twin.batches)
    before = training.contents()[:2]
    with pytest.raises(FloatingPointError, match=rf"step {at}: the gradients of body\.1\.weight"):
        training.optimizer.step()
    same(training.contents()[:2], before)
    training.optimizer.zero_grad()
    # as if the two had never been
    for _ in range(INTERVAL + 1):
        assert training.step() == twin.step()
    same(training.contents(), twin.contents())


@pytest.mark.parametrize("at", [1, INTERVAL - 1])  # the latter makes the next a refresh
@pytest.mark.parametrize("label", OPTIMIZERS)
def test_nan_changes_nothing_and_is_raised_in_the_next_step(label, at):
    pretend.run(nan_is_raised_in_the_next_step, label, at)


def nan_at_a_refresh(label):
    training = Training(OPTIMIZERS[label])
    for _ in range(INTERVAL):
        training.step()
    training.backward()
    pretend.raw(training.model.body[1].weight.grad)[3, 4] = math.nan
    before = training.contents()
    with pytest.raises(FloatingPointError, match=rf"step {INTERVAL}: the gradients of body\.1"):
        training.optimizer.step()
    same(training.contents(), before)
    training.optimizer.zero_grad()
    training.step()
    assert training.optimizer.last_refresh


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_nan_at_a_refresh_is_raised_at_once_and_changes_nothing(label):
    pretend.run(nan_at_a_refresh, label)


def skipped(label, at):
    training, twin = (Training(OPTIMIZERS[label], nonfinite="skip") for _ in range(2))
    for one in (training, twin):
        for _ in range(at):
            one.step()
    for _ in range(2):  # two in a row
        bad_step(training)
        next(twin.batches)
    assert training.optimizer.skipped_steps == 2
    same(training.contents(), twin.contents())
    for _ in range(INTERVAL + 1):
        assert training.step() == twin.step()
    same(training.contents(), twin.contents())


@pytest.mark.parametrize("at", [1, INTERVAL - 1, INTERVAL])
@pytest.mark.parametrize("label", OPTIMIZERS)
def test_steps_are_skipped_as_if_they_had_not_been(label, at):
    pretend.run(skipped, label, at)


def a_state_dict_waits(label):
    training = Training(OPTIMIZERS[label])
    for _ in range(2):
        training.step()
    step = training.optimizer.state_dict()["param_groups"][0]["step"]
    bad_step(training)
    assert training.optimizer.state_dict()["param_groups"][0]["step"] == step


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_a_state_dict_has_the_counters_of_what_was_done(label):
    pretend.run(a_state_dict_waits, label)


def a_loaded_state_is_what_counts(label, nonfinite):
    training, twin = (Training(OPTIMIZERS[label], nonfinite=nonfinite) for _ in range(2))
    for one in (training, twin):
        one.step()
    saved = [copy.deepcopy(one.optimizer.state_dict()) for one in (training, twin)]
    for one in (training, twin):
        one.step()
    bad_step(training)
    next(twin.batches)
    for one, state in zip((training, twin), saved, strict=True):
        one.optimizer.load_state_dict(state)
    for _ in range(INTERVAL + 1):
        assert training.step() == twin.step()
    same(training.contents(), twin.contents())
    assert training.optimizer.skipped_steps == (1 if nonfinite == "skip" else 0)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("label", OPTIMIZERS)
def test_nan_before_a_state_is_loaded_has_no_effect_on_it(label, nonfinite):
    pretend.run(a_loaded_state_is_what_counts, label, nonfinite)


def without_head(label):
    def make(model, **options):
        body = [p for name, p in model.named_parameters() if not name.startswith("head")]
        return OPTIMIZERS[label](body, model=model, **options)

    return make


def a_group_comes_after_nan(label):
    training, twin = (Training(without_head(label), nonfinite="skip") for _ in range(2))
    for one in (training, twin):
        one.step()
    bad_step(training)
    next(twin.batches)
    for one in (training, twin):
        one.optimizer.add_param_group({"params": [*one.model.head.parameters()]})
        one.model.zero_grad()
    for _ in range(INTERVAL + 1):
        assert training.step() == twin.step()
    same(training.contents(), twin.contents())


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_a_group_can_be_added_after_nan(label):
    pretend.run(a_group_comes_after_nan, label)


class SkippingNet(Net):
    """A network whose last two layers can be left out."""

    def __init__(self):
        super().__init__()
        self.body.append(nn.Linear(60, 60))

    def forward(self, images, words):
        body = self.body
        if self.skips:
            self.body = body[:2]
        try:
            return super().forward(images, words)
        finally:
            self.body = body


def a_layer_that_waits(label):
    make = partial(Training, OPTIMIZERS[label], net=SkippingNet, nonfinite="skip")
    training, twin = make(), make()
    for one in (training, twin):
        one.model.skips = False
        one.step()
        one.model.skips = True
        for _ in range(INTERVAL):  # the last of them is a refresh
            one.step()
        waiting = one.optimizer.curvature["body.2"]
        assert (waiting.due, waiting.idle) == (True, True)
    bad_step(training)
    assert training.optimizer.skipped_steps == 1
    same(training.contents(), twin.contents())


def idle_layers_are_asked_at_once(label):
    """Their gradients are zeros, which a loss may have left or `set_to_none=False`."""
    training = Training(OPTIMIZERS[label], net=SkippingNet)
    training.model.skips = False
    training.step()
    training.model.skips = True
    found = []
    for _ in range(2 * INTERVAL + 1):
        training.backward()
        with pretend.recorded() as record:
            training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
        found.append(len(record.synchronisations))
    assert not training.optimizer.curvature["body.2"].refreshes > 1
    refreshes = found[INTERVAL - 1 :: INTERVAL]
    ordinary = [n for i, n in enumerate(found) if (i + 1) % INTERVAL]
    assert max(refreshes) <= 4
    assert max(ordinary) <= 1


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_layers_that_no_loss_reached_cost_one_wait_for_all(label):
    pretend.run(idle_layers_are_asked_at_once, label)


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_a_layer_that_waits_for_statistics_still_does_after_nan(label):
    pretend.run(a_layer_that_waits, label)


def it_is_freed_at_once(label):
    training = Training(OPTIMIZERS[label])
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            training.step()
        kept = weakref.ref(training.optimizer)
        del training.optimizer
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_an_optimizer_is_freed_without_a_garbage_collection(label):
    pretend.run(it_is_freed_at_once, label)


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
        before = trainings[1].contents()[0]
        for training in trainings:
            for _ in range(steps):
                training.step()
    finally:
        polar._polar = own
    triples = list(zip(before, *(training.contents()[0] for training in trainings), strict=True))
    of_weights = max(float((a - b).norm() / b.norm()) for _, a, b in triples)
    of_steps = max(float((a - b).norm() / (b - w).norm()) for w, a, b in triples)
    return of_weights, of_steps


@pytest.mark.parametrize(
    "name", cases_of("THOR", fast=("defaults", "split", "clip", "skip", "decay"))
)
def test_thor_takes_the_same_steps_as_on_a_cpu(name):
    options = {"lr": 0.02, **options_of("THOR", name)}
    of_weights, _ = pretend.run(compare_with_the_cpu, "THOR", options, 9)
    assert of_weights < 1e-12


@pytest.mark.parametrize(
    "name", cases_of("ThorMuon", fast=("defaults", "split", "tight bound", "no momentum"))
)
def test_thor_muon_takes_the_same_steps_as_on_a_cpu(name):
    """With the same polar factors; six rounds of products differ from eigenvectors by 5e-3."""
    options = {"lr": 0.02, **options_of("ThorMuon", name)}
    of_weights, _ = pretend.run(compare_with_the_cpu, "ThorMuon", options, 9, same_polar=True)
    assert of_weights < 1e-12
    _, of_steps = pretend.run(compare_with_the_cpu, "ThorMuon", options, 1)
    assert of_steps < 5e-3


def test_projections_of_fused_weights_take_the_same_steps_as_on_a_cpu():
    options = {"lr": 0.02, "net": SplitNet, "split_dim": 16}
    of_weights, _ = pretend.run(compare_with_the_cpu, "ThorMuon", options, 5, same_polar=True)
    assert of_weights < 1e-12


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_copied_matrices_take_the_same_steps_as_on_a_cpu(label):
    """A tensor without memory of its own does not tell by an address what is a copy of it."""
    options = {"lr": 0.02, "net": CopyNet}
    of_weights, _ = pretend.run(compare_with_the_cpu, label, options, 5, same_polar=True)
    assert of_weights < 1e-12


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
    """A step with a gradient scaler, and a convolution of more patches than are taken; whose
    curvature differs by so much from that on a CPU.
    """
    found, pretend.Pretend.has_float64 = [], False
    try:
        for put, move in ((pretend.Pretend, pretend.moved), (lambda x: x, lambda x: x)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(1296, 2))
            optimizer = OPTIMIZERS[label](move(model))
            optimizer.grad_scale, optimizer.found_inf = put(torch.tensor(4.0)), put(torch.zeros(()))
            x, scale = put(torch.randn(8, 1, 18, 18)), optimizer.grad_scale
            (model(x).square().mean() * scale).backward()
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
        ("THOR", "GPT-2", 80),
        ("THOR", "ResNet-18", 90),
        ("ThorMuon", "GPT-2", 200),
        ("ThorMuon", "ResNet-18", 500),
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
    host = torch.ones(3)
    waiting = {
        "item": lambda: x.sum().item(),
        "bool": lambda: bool(x.sum() > 0),
        "list": lambda: x.tolist(),
        "to the host": lambda: x.cpu(),
        "into the host": lambda: torch.empty(3, 3).copy_(x, non_blocking=True),
        "pageable": lambda: host.to("toy", non_blocking=True),
        "from numbers": lambda: torch.tensor([1.0], device="toy"),
        "new tensor": lambda: x.new_tensor([1.0]),
        "mask": lambda: x[mask],
        "nonzero": lambda: x.nonzero(),
        "unique": lambda: x.unique(),
        "masked_select": lambda: x.masked_select(x > 0),
        "repeat": lambda: torch.repeat_interleave(counts),
        "eigh": lambda: torch.linalg.eigh(x),
        "svd": lambda: torch.linalg.svd(x),
        "cholesky": lambda: torch.linalg.cholesky(x),
        "cholesky_inverse": lambda: torch.cholesky_inverse(x),
        "inv": lambda: torch.linalg.inv(x),
        "solve": lambda: torch.linalg.solve(x, x),
        "equal": lambda: torch.equal(x, x),
    }
    pinned = torch.ones(3, 3)
    pinned.pretends_pinned = True
    free = {
        "product": lambda: x @ x,
        "pinned": lambda: pinned.to("toy", non_blocking=True),
        "into pinned": lambda: pinned.copy_(x, non_blocking=True),
        "cholesky_ex": lambda: torch.linalg.cholesky_ex(x),
        "index": lambda: x[counts],
        "where": lambda: torch.where(x > 0, x, 0.0),
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
