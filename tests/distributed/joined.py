"""Small models, and their training on ranks beside one process on the joined batch."""

import contextlib
import hashlib
import inspect
import re
from collections import defaultdict
from operator import methodcaller

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from every_kind import Experts
from torch_thor import THOR, Distributed

SIZE = 12  # examples of a joined batch: divided by 1, 2, 3 and 4
OPTIONS = {
    "lr": 0.02,
    "damping": 0.05,
    "split_dim": 8,
    "update_interval": 3,
    "trace_thresholds": (0.08, 0.02),
}
# max_update_ratio bounds the rows of each process, so it is off where shards are compared with one
# process. Blocks of one row are cut alike for any number of shards, which leave out
# grouped convolutions.
ROWS = {"max_update_ratio": None, "split_dim": 1, "layers": "-images.3"}


class Both(nn.Module):
    """Images through convolutions, tokens through an embedding and attention; norms, biases."""

    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(),
            nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5, bias=False),
        )  # fmt: skip
        self.tokens, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rows, self.head = nn.Linear(8, 7), nn.Linear(7, 5)

    def forward(self, batch):
        pixels, words = batch
        x = self.norm(self.tokens(words))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.images(pixels) + self.head(torch.tanh(self.rows(x)).mean(1))


class Routed(nn.Module):
    """Words through experts, a recurrent layer and a cell."""

    def __init__(self):
        super().__init__()
        self.tokens, self.experts = nn.Embedding(11, 8), Experts(5, 8, 8)
        self.rnn = nn.GRU(8, 4, batch_first=True, bidirectional=True)
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 5)

    def forward(self, batch):
        x = self.tokens(batch[1])
        x = torch.tanh(x + self.experts(x, batch[1]))
        state, x = None, self.rnn(x)[0]
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0])


class Rows(nn.Module):
    """The first eight numbers of the images, as rows."""

    def forward(self, batch):
        return batch[0].flatten(1)[:, :8]


def network():
    torch.manual_seed(3)
    return Both().double()


def routed():
    torch.manual_seed(3)
    return Routed().double()


def linear(dtype=torch.float64):
    """No shard has as many rows as the next, and the last of four may have none."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 11), nn.Tanh(), nn.Linear(11, 7, bias=False), nn.Tanh(), nn.Linear(7, 5)
    return nn.Sequential(Rows(), *layers, nn.Tanh(), nn.Linear(5, 5)).to(dtype)


class TwoHeads(nn.Module):
    """A head for the first word 0, and a head for 1; a head without examples is not called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.trunk = Rows(), nn.Linear(8, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
        self.double()

    def forward(self, batch):
        x, which = torch.tanh(self.trunk(self.rows(batch))), batch[1][:, 0]
        outputs = x.new_zeros(len(x), 5)
        for i, head in enumerate(self.heads):
            if (which == i).any():
                outputs[which == i] = head(x[which == i])
        return outputs


class RowParts(nn.Module):
    """A linear layer as a layer for each shard of its rows: blocks end where shards end."""

    def __init__(self, layer, world):
        super().__init__()
        self.parts, row = nn.ModuleList(), 0
        for weight in layer.weight.detach().chunk(world):
            part = nn.Linear(*weight.shape[::-1], bias=layer.bias is not None, dtype=weight.dtype)
            rows, row = slice(row, row + len(weight)), row + len(weight)
            part.load_state_dict({key: value[rows] for key, value in layer.state_dict().items()})
            self.parts.append(part)

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], dim=-1)


def in_row_parts(model, world):
    """Replace all linear layers."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, RowParts(module, world))
    return model


class Checkpointed(nn.Module):
    """The linear layers, each inside an activation checkpoint."""

    def __init__(self):
        super().__init__()
        self.rows, *layers = linear()
        self.layers = nn.Sequential(*layers)

    def forward(self, batch):
        x = self.rows(batch).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def stream(count, dtype=torch.float64):
    """Joined batches: ((images, tokens), labels)."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        pixels = torch.randn(SIZE, 2, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
        words = torch.randint(11, (SIZE, 4), generator=generator)
        yield (pixels, words), torch.randint(5, (SIZE,), generator=generator)


def part(batch, which):
    """A slice of a joined batch."""
    (pixels, words), labels = batch
    return (pixels[which], words[which]), labels[which]


def shares(batches, rank, world):
    """A rank's parts of joined batches."""
    return [part(batch, slice(rank, None, world)) for batch in batches]


def sum_over(terms):
    """A loss that is a sum divided by a number, of which a rank without examples has no NaN."""
    return lambda output, labels: F.cross_entropy(output, labels, reduction="sum") / terms


def train(model, optimizer, batches, loss=F.cross_entropy, micro=1, step=methodcaller("step")):
    """The ordinary loop, accumulating over `micro` parts. Returns what each step decided."""
    decisions = []
    for batch in batches:
        for i in range(micro):
            inputs, labels = part(batch, slice(i, None, micro))
            later = getattr(model, "no_sync", None) if i < micro - 1 else None
            with (later or contextlib.nullcontext)():
                (loss(model(inputs), labels) / micro).backward()
        step(optimizer)
        decisions.append({event.layer: event.decision.name for event in optimizer.last_refresh})
        optimizer.zero_grad()
    return decisions


def counted(optimizer):
    """Take a step; returns how often it has started which collective, without those of DDP."""
    with CommDebugMode() as counter:
        optimizer.step()
    counts = counter.get_comm_counts().items()
    return {str(name).rpartition(".")[2]: count for name, count in counts if count}


def uneven(model, optimizer, first, step):
    """The last rank has one example, the others share the rest, all with one weight."""
    batches = list(stream(10))
    if step > 1:
        own = slice(0, 1) if first == step - 1 else slice(1 + first, None, step - 1)
        batches = [part(batch, own) for batch in batches]
    optimizer.loss_terms = SIZE // step
    return train(model, optimizer, batches, loss=sum_over(SIZE // step))


def optimizer_of(model, method=THOR, *, distributed=None, **options):
    """An optimizer with those options of these tests that it has."""
    known = inspect.signature(method).parameters
    options = {name: value for name, value in {**OPTIONS, **options}.items() if name in known}
    return method(model, distributed=Distributed(**(distributed or {})), **options)


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def world_of(way):
    """The number of ranks of a mesh; two under DDP."""
    return torch.Size(way).numel() if isinstance(way, tuple) else 2


def made(way, make=network, ddp=None, fsdp=None, inner=("images.0", "attention"), **options):
    """A model and its optimizer under "ddp" (made before), or on a mesh of a shape."""
    model = make()
    if way == "ddp":
        optimizer = optimizer_of(model, **options)
        return ddp(model) if callable(ddp) else DDP(model, **(ddp or {})), optimizer
    fsdp = {"mesh": mesh_of(way), **(fsdp or {})}
    for module in [module for name, module in model.named_modules() if name in inner]:
        fully_shard(module, **fsdp)  # separately
    model = fully_shard(model, **fsdp)
    return model, optimizer_of(model, **options)


def single(make=network, **options):
    """The same in one process, whatever the default group is."""
    model = make()
    return model, optimizer_of(model, **{**options, "distributed": {"process_group": False}})


def own(tensor):
    """What this rank holds of a tensor."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def weights_of(model):
    """Whole parameters, by name."""
    found = defaultdict(list)
    for name, p in getattr(model, "module", model).named_parameters():
        whole = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
        found[re.sub(r"\.parts\.\d+|_orig_mod\.", "", name)].append(whole)
    return {name: torch.cat(parts) for name, parts in found.items()}


def assert_same_weights(ours, theirs, rtol=1e-8, atol=1e-11):
    """Two models have the same whole parameters."""
    ours = weights_of(ours)
    for name, wanted in weights_of(theirs).items():
        where = f"{name}: {{}}".format
        torch.testing.assert_close(ours[name], wanted, rtol=rtol, atol=atol, msg=where)


def state_of(optimizer):
    """What this rank holds of the state of each parameter, by its number."""
    found = {}
    for i, state in optimizer.state_dict()["state"].items():
        found[i] = {key: own(v) if torch.is_tensor(v) else v for key, v in state.items()}
    return found


def assert_same_training(ranks, process, rtol=1e-8, atol=1e-11):
    """Two trainings (model, optimizer, decisions) are the same, with their weights and state."""
    (model, optimizer, decisions), (twin, other, wanted) = ranks, process
    assert decisions == wanted
    assert_same_weights(model, twin, rtol, atol)
    state = state_of(optimizer), state_of(other)
    torch.testing.assert_close(*state, rtol=rtol, atol=max(atol, 1e-9))


def as_one_process(
    rank, world, go, make=network, *, way="ddp", parts=False, twin=None, ddp=None, **both
):
    """`go(model, optimizer, first, step)` gets the same weights on ranks and in one process.

    Under DDP the state is the same, too. A rank has every `step`-th example from `first` on. With
    `parts` the one process has a layer for each shard of a layer; `twin` are options that only it
    has. Returns the decisions and the bits of this rank.
    """
    rounding = {key: both.pop(key) for key in ("rtol", "atol") if key in both}
    of_shards = {key: both.pop(key) for key in ("fsdp", "inner") if key in both}
    model, optimizer = made(way, make, ddp, **of_shards, **both)
    decisions = go(model, optimizer, rank, world)
    # made after that, because compiled models run eagerly as long as an optimizer awaits statistics
    make_one = (lambda: in_row_parts(make(), world)) if parts else make
    theirs = single(make_one, **{**both, **(twin or {})})
    wanted = go(*theirs, 0, 1)
    if way == "ddp":
        assert_same_training((model, optimizer, decisions), (*theirs, wanted), **rounding)
    else:
        assert parts or decisions == wanted
        assert_same_weights(model, theirs[0], **rounding)
    return decisions, digest(model, optimizer)


def digest(model, optimizer):
    """A hash of every bit of the weights and optimizer state that this rank holds."""
    found = hashlib.sha256()
    for name, p in getattr(model, "module", model).named_parameters():
        found.update(name.encode() + own(p).numpy().tobytes())
    for number, state in sorted(state_of(optimizer).items()):
        for key, value in sorted(state.items()):
            bits = value.numpy().tobytes() if torch.is_tensor(value) else repr(value).encode()
            found.update(f"{number} {key}".encode() + bits)
    for group in optimizer.param_groups:  # loading may make lists of tuples
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
        del options["params"], options["update_interval"]
        found.update(repr(options).encode())
    return found.hexdigest()


def marked(cases, slow):
    """The names of cases, of which some are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in cases]
