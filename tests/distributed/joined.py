"""A small model of many kinds of layers, and its training on ranks beside one process on the joined batch."""

import contextlib
import copy
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_thor import THOR, Distributed

SIZE = 12  # examples of a joined batch: divided by 1, 2, 3 and 4
OPTIONS = {"lr": 0.02, "damping": 0.05, "split_dim": 8, "update_interval": 3, "trace_thresholds": (0.08, 0.02)}


class Both(nn.Module):
    """Images through plain and grouped convolutions, tokens through an embedding and attention; norms, biases."""

    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Conv2d(4, 6, 2, groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(24, 5, bias=False),
        )
        self.tokens = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rows = nn.Linear(8, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, batch):
        pixels, words = batch
        x = self.norm(self.tokens(words))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.images(pixels) + self.head(torch.tanh(self.rows(x)).mean(1))


def network():
    torch.manual_seed(3)
    return Both().double()


class Experts(nn.Module):
    """A linear layer a kind of word; some words are on one rank alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8, 8) / 3)
        self.weight_bias = nn.Parameter(torch.zeros(5, 8))

    def forward(self, x, words):
        y = torch.zeros_like(x)
        for e in range(5):
            mine = words % 5 == e
            y[mine] = F.linear(x[mine], self.weight[e], self.weight_bias[e])
        return y


class Routed(nn.Module):
    """Words through experts."""

    def __init__(self):
        super().__init__()
        self.tokens, self.experts, self.head = nn.Embedding(11, 8), Experts(), nn.Linear(8, 5)

    def forward(self, batch):
        words = batch[1]
        x = self.tokens(words)
        return self.head(torch.tanh(x + self.experts(x, words)).mean(1))


def routed():
    torch.manual_seed(3)
    return Routed().double()


def stream(count, size=SIZE):
    """Joined batches: ((images, tokens), labels)."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        pixels = torch.randn(size, 2, 5, 5, generator=generator, dtype=torch.float64)
        words = torch.randint(11, (size, 4), generator=generator)
        yield (pixels, words), torch.randint(5, (size,), generator=generator)


def part(batch, which):
    """A slice of a joined batch."""
    (pixels, words), labels = batch
    return (pixels[which], words[which]), labels[which]


def share(batch, rank, world):
    """A rank's part of a joined batch."""
    return part(batch, slice(rank, None, world))


def mean_loss(output, labels):
    return F.cross_entropy(output, labels)


def train(model, optimizer, batches, loss=mean_loss, micro=1, after_backward=None):
    """The ordinary loop, with gradient accumulation over `micro` parts. Returns what each step decided."""
    decisions = []
    for batch in batches:
        for i in range(micro):
            inputs, labels = part(batch, slice(i, None, micro))
            later = getattr(model, "no_sync", contextlib.nullcontext) if i < micro - 1 else contextlib.nullcontext
            with later():
                (loss(model(inputs), labels) / micro).backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()
        decisions.append({event.layer: event for event in optimizer.last_refresh})
        optimizer.zero_grad()
    return decisions


def parallel(rank, world, make=network, ddp=None, **options):
    """A model under DDP and its THOR, made as the training application makes them: the optimizer first."""
    model = make()
    optimizer = THOR(model, **{**OPTIONS, **options})
    return DDP(model, **(ddp or {})), optimizer


def alone(make=network, **options):
    """The same in one process, whatever the default group is."""
    model = make()
    return model, THOR(model, **{**OPTIONS, **options}, distributed=Distributed(process_group=False))


def assert_same_training(ranks, single, rtol=1e-8, atol=1e-11):
    """Both have made the same decisions, and the same weights and state."""
    (model, optimizer, decisions), (twin, its_optimizer, wanted) = ranks, single
    assert [{k: e.decision for k, e in step.items()} for step in decisions] == [
        {k: e.decision for k, e in step.items()} for step in wanted
    ]
    for (name, p), q in zip(getattr(model, "module", model).named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
        ours, its = optimizer.state[p], its_optimizer.state[q]
        assert ours.keys() == its.keys(), name
        for key, value in ours.items():
            torch.testing.assert_close(
                value, its[key], rtol=rtol, atol=max(atol, 1e-9), msg=lambda m, at=(name, key): f"{at}: {m}"
            )


def digest(model, optimizer):
    """A hash of every bit of weights and optimizer state."""
    found = hashlib.sha256()
    for name, p in getattr(model, "module", model).named_parameters():
        found.update(name.encode() + p.detach().numpy().tobytes())
        for key, value in sorted(optimizer.state[p].items()):
            found.update(key.encode() + (value.numpy().tobytes() if torch.is_tensor(value) else repr(value).encode()))
    for group in optimizer.param_groups:
        found.update(repr({k: v for k, v in group.items() if k not in ("params", "update_interval")}).encode())
    return found.hexdigest()


def copies(model, optimizer):
    """Weights and optimizer state, to look whether they change."""
    return copy.deepcopy((getattr(model, "module", model).state_dict(), optimizer.state_dict()))
