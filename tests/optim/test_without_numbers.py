"""Memory dry runs: on the meta device and under FakeTensorMode a step makes the state that a real
one makes, without numbers.
"""

import contextlib
import copy
import warnings

import pytest
import torch
from timm.layers import ScaledStdConv2d
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from tiny import assert_same, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

OPTIMIZERS = {
    "THOR": THOR,
    "THOR, options": lambda model, **own: THOR(
        model, kl_clip=1e-3, split_dim=4, factor_decay=0.5, nesterov=True, weight_decay=0.1, **own
    ),
    "THOR, sampled": lambda model, **own: THOR(model, fisher="sampled", **own),
    "ThorMuon": ThorMuon,
    "ThorMuon, options": lambda model, **own: ThorMuon(
        model, lr=0.1, split_dim=4, weight_decay=0.1, max_update_ratio=None, **own
    ),
    "LAMB": LAMB,
    "AGCSGD": lambda model, **own: AGCSGD(model, momentum=0.9, **own),
    "AGCSGD, one by one": lambda model, **own: AGCSGD(model, momentum=0.9, foreach=False, **own),
}
PLACES = {  # the device, whether the tensors are fake, and whether the loop runs on it by default
    "meta": ("meta", False, False),
    "meta by default": ("meta", False, True),
    "fake": ("cpu", True, False),
}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, 6))
        self.bias = nn.Parameter(torch.zeros(3, 6))

    def forward(self, x):
        return (torch.bmm(x.expand(3, *x.shape), self.weight.mT) + self.bias[:, None]).mean(0)


class Net(nn.Module):
    """A layer of most kinds, whose statistics read numbers: padding, many patches, gates."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.scaled = BartScaledWordEmbedding(11, 6, 1, embed_scale=2.0)
        self.places = nn.Parameter(torch.zeros(5, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.up, self.down, self.norm = Conv1D(8, 6), Conv1D(6, 8), nn.LayerNorm(6)
        self.experts = Experts()
        self.image = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3, groups=4, stride=2),
            nn.ConvTranspose2d(4, 6, 2),
            ScaledStdConv2d(6, 6, 1),
        )
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.decoder = nn.Linear(6, 11)
        self.decoder.weight = self.words.weight

    def forward(self, tokens, images):
        h = self.words(tokens) + self.scaled(tokens) + self.places
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.down(F.gelu(self.up(self.rnn(h)[0].contiguous())))
        h = self.experts(h.flatten(0, 1)).view_as(h)
        h = self.norm(h) + self.image(images).mean((2, 3))[:, None]
        h = h + self.frozen(h) + self.narrow(h.bfloat16()).float()
        return self.decoder(h) * self.phase.abs().sum()


def outline(value):
    """What a dry run reads of a state: shapes, dtypes and types."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: outline(one) for key, one in value.items()}
    return [outline(one) for one in value] if isinstance(value, list) else type(value)


def trained(make, device, fake, by_default, steps=3):
    """The outlines of weights and state after some steps, and what each parameter gets."""
    torch.manual_seed(0)
    with FakeTensorMode() if fake else contextlib.nullcontext():
        with torch.device(device):
            model = Net()
        with torch.device(device) if by_default else contextlib.nullcontext():
            optimizer = make(model)
            for _ in range(steps):
                tokens = torch.randint(11, (4, 5), device=device)
                output = model(tokens, torch.randn(4, 1, 20, 20, device=device))
                if getattr(optimizer, "fisher", "") == "sampled":
                    optimizer.sample_fisher(output, dim=-1)
                output.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        states = [outline(optimizer.state[p]) for p in model.parameters() if p.requires_grad]
        coverage = [str(one) for one in getattr(optimizer, "coverage", list)()]
        refreshes = {name: bool(of.refreshes) for name, of in curvature_of(optimizer).items()}
        devices = {
            v.device for of in optimizer.state.values() for k, v in of.items() if is_large(v)
        }
    return states, coverage, refreshes, devices


def curvature_of(optimizer):
    return getattr(optimizer, "curvature", {})


def is_large(value):
    return isinstance(value, torch.Tensor) and value.dim() > 0


@pytest.fixture(scope="module")
def on_cpu():
    known = {}

    def find(name):
        if name not in known:
            known[name] = trained(OPTIMIZERS[name], "cpu", False, False)
        return known[name]

    return find


# fake tensors are slow, and a default device is the same for all
PAIRS = [
    pytest.param(n, p, marks=[pytest.mark.slow] if (n, p) == ("THOR", "fake") else [])
    for n in OPTIMIZERS
    for p in PLACES
    if p == "meta" or n in ("THOR", "ThorMuon")
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "place"), PAIRS)
def test_the_state_is_that_of_a_real_step(name, place, on_cpu):
    *found, devices = trained(OPTIMIZERS[name], *PLACES[place])
    *expected, _ = on_cpu(name)
    assert found == expected
    assert devices == {torch.device(PLACES[place][0])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [THOR, ThorMuon])
def test_every_refresh_takes_new_factors(make):
    """Nothing is read, so nothing stops or keeps its factors; a state dict can be loaded."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.ones(4, 5)
    optimizer = make(model, update_interval=2)
    for _ in range(5):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [layer.refreshes for layer in optimizer.curvature.values()] == [3, 3]
    assert optimizer.skipped_steps == 0


class Branches(nn.Module):
    """A branch with numbers, and one on the meta device."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(0)
        real = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        meta = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        meta.to("meta")
        self.branches = nn.ModuleList([meta, real] if first == "meta" else [real, meta])

    def real(self):
        return next(branch for branch in self.branches if not branch[0].weight.is_meta)


def loss_of(branch, x):
    return branch(x.to(branch[0].weight.device)).square().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["real", "meta"])
@pytest.mark.parametrize(
    "make",
    [
        lambda params, model: THOR(params, model=model, update_interval=2),
        lambda params, model: THOR(params, model=model, update_interval=2, kl_clip=1e-4),
        lambda params, model: ThorMuon(params, model=model, update_interval=2),
        lambda params, model: LAMB(params),
        lambda params, model: AGCSGD(params, model=model, exclude=(), lr=0.1),
    ],
    ids=["THOR", "THOR, clip", "ThorMuon", "LAMB", "AGCSGD"],
)
def test_what_has_numbers_is_trained_beside_what_has_none(make, first):
    """With gradients of both, or of the former alone; as torch's AdamW does."""
    for trains_both in (True, False):
        model, alone = Branches(first), Branches(first).real()
        optimizer, other = make(model.parameters(), model), make(alone.parameters(), alone)
        for x in torch.randn(5, 4, 5):
            for branch in model.branches if trains_both else [model.real()]:
                loss_of(branch, x).backward()
            loss_of(alone, x).backward()
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
        assert_same(weights(model.real()), weights(alone))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_numbers_that_are_not_finite_are_seen_beside_what_has_none():
    model = Branches("meta")
    optimizer = THOR(model)
    for branch in model.branches:
        loss_of(branch, torch.randn(4, 5)).backward()
    model.real()[3].weight.grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"gradients of branches\.1\.3\.weight hold NaN"):
        optimizer.step()


@pytest.mark.parametrize("make", [THOR, ThorMuon, LAMB, AGCSGD])
def test_a_first_step_with_lr_0_is_a_step(make):
    """And not the one by which torch.distributed.checkpoint creates the state."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = make(model, lr=0.0)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    if make in (THOR, ThorMuon):
        assert all(layer.refreshes == 1 for layer in optimizer.curvature.values())
