"""FSDP2 and HSDP take the steps of one process that cuts its blocks at the same places.

Blocks of one row are cut alike however rows are divided. With larger blocks, the reference has a
layer for each shard. An ordinary step sends nothing, or what its option needs.
"""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from joined import (
    SIZE,
    Checkpointed,
    Rows,
    as_one_process,
    assert_same_weights,
    counted,
    linear,
    made,
    marked,
    network,
    part,
    shares,
    single,
    stream,
    train,
    uneven,
    world_of,
)
from third_optimizer import NaturalSGD
from torch_thor import THOR, ThorMuon

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a view")
TWO, HSDP = (2,), (2, 2)


class Free(nn.Module):
    """A matrix without a kind, numbered matrices, a convolution; tall, wide and fused weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 5, 2)
        self.free = nn.Parameter(torch.randn(9, 7) / 3)
        self.numbered = nn.Parameter(torch.randn(3, 7, 4) / 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.tokens = nn.Embedding(11, 8)
        self.rows, self.tall, self.head = nn.Linear(80, 9), nn.Linear(4, 13), nn.Linear(13, 5)
        self.double()

    def forward(self, batch):
        pixels, words = batch
        x = self.tokens(words)
        x = self.attention(x, x, x, need_weights=False)[0].mean(1)
        x = torch.cat([torch.tanh(self.conv(pixels)).flatten(1)[:, :72], x], dim=1)
        x = self.rows(x) @ self.free
        x = torch.einsum("bi,eij->bj", torch.tanh(x), self.numbered)
        return self.head(torch.tanh(self.tall(x)))


class Split(nn.Module):
    """A layer with projections of five, one and five rows, which shards cut elsewhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.fused, self.head = Rows(), nn.Linear(8, 11), nn.Linear(11, 5)
        self.double()

    def forward(self, batch):
        return self.head(torch.tanh(self.fused(self.rows(batch))))


def trained_before():
    """A network whose matrices have a large singular value, as training leaves them."""
    model, generator = network(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                rows, columns = p.flatten(1).shape
                left = torch.randn(rows, 1, generator=generator)
                p += (0.3 * left @ torch.randn(1, columns, generator=generator)).view_as(p)
    return model


# ---- what ordinary steps send --------------------------------------------------------------------


def sharded(rank, world, make=network, layers=(), micro=1, **options):
    """Returns the kinds of decisions, how many collectives ordinary steps start, and the bits."""
    sent = []

    def go(model, optimizer, first, step):
        sent.append([])  # of the ranks, then of the one process

        def count(optimizer):
            started = sum(counted(optimizer).values())
            if not optimizer.last_refresh:
                sent[-1].append(started)

        batches, micros = shares(stream(8), first, step), micro if step > 1 else 1
        decisions = train(model, optimizer, batches, micro=micros, step=count)
        factors = {state.get("lr_factor") for state in optimizer.state.values()}
        assert min(factors) < 0.1 if make is trained_before else factors == {None}
        return decisions

    # shards leave out the convolution of two groups anyway
    options = {"max_update_ratio": None, "split_dim": 1, "layers": [*layers] or None, **options}
    of_network = make in (network, trained_before)
    twin = {"layers": [*layers, "-images.3"] if of_network else options["layers"]}
    decisions, bits = as_one_process(rank, world, go, make, twin=twin, **options)
    return {kind for step in decisions for kind in step.values()}, set(sent[0]), bits


ROUNDING = {"rtol": 1e-6, "atol": 1e-8}
MUON = {"method": ThorMuon, "damping": 0.1, "layers": ["-attention.v_proj"], **ROUNDING}
# whole matrices have the blocks of rows of one process, however shards divide them
WHOLE = {
    "make": Free, "inner": (), "method": ThorMuon, "lr": 0.05, "damping": 0.1, "split_dim": 4,
    "distributed": {"whole_matrices": True}, "rtol": 1e-4, "atol": 1e-6,
}  # fmt: skip
BOUNDED = {"weight_decay": 0.1, "max_update_ratio": 0.15}
SPLIT = {"make": Split, "inner": ("fused",), "layers": (), "row_splits": {"fused": (5, 1, 5)}}
AVERAGED = {"weight_decay": 0.1, "micro": 3, "factor_decay": 0.6, "nesterov": True}
BEFORE = {"make": trained_before, "lr": None, "weight_decay": 0.1}
SENT = {  # the meshes, options, and how many collectives an ordinary step starts
    "plain": ([(1,), TWO, (4,), HSDP, (2, 1)], {}, 0),
    "accumulation": ([TWO, HSDP], AVERAGED, 0),
    "ThorMuon": ([TWO, HSDP], MUON, 0),
    "ThorMuon, anytime": ([TWO, HSDP], {**MUON, "anytime": True}, 0),
    "ThorMuon, trained before": ([TWO, HSDP], {**MUON, **BEFORE}, 0),
    "a third optimizer": ([TWO], {"method": NaturalSGD}, 0),
    # the sum of all ranks
    "bounded by kl_clip": ([TWO, HSDP], {"kl_clip": 1e-4}, 1),
    # there and back
    "whole matrices": ([TWO], {**WHOLE, "split_dim": None, "nesterov": False}, 2),
    "whole matrices, shards without rows": ([(4,)], WHOLE, 2),
    # and the norms of the weights
    "whole matrices, bounded": ([HSDP], {**WHOLE, **BOUNDED, "layers": ["-attention.k_proj"]}, 3),
    "split rows": ([TWO, (4,)], {**MUON, **SPLIT}, 0),
    "split rows, whole matrices": ([TWO, HSDP, (4,)], {**WHOLE, **SPLIT}, 2),
}
# combinations of what others tell apart
SLOW = "whole matrices, bounded", "whole matrices, shards without rows", "accumulation"


@pytest.mark.parametrize("name", marked(SENT, SLOW))
def test_equals_one_process_and_sends_only_what_it_must(run, name):
    meshes, options, collectives = SENT[name]
    for mesh in meshes:
        found = run(world_of(mesh), functools.partial(sharded, way=mesh, **options))
        kinds, sent, bits = zip(*found, strict=True)
        assert [*sent] == [{collectives}] * len(sent)
        assert options or set.union(*kinds) == {"UPDATE", "KEEP", "STOP"}
        assert mesh != HSDP or bits[:2] == bits[2:], "replicas differ in some bit"


# ---- layers, batches and loops that differ -------------------------------------------------------


def ordinary(model, optimizer, first, step):
    return train(model, optimizer, shares(stream(6), first, step))


class Shared(nn.Module):
    """A weight that is used twice, and a weight that two modules share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.first, self.second = Rows(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 5)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, batch):
        x = torch.tanh(self.first(torch.tanh(self.first(self.rows(batch)))))
        return self.last(torch.tanh(self.second(x)))


def reduced_once(model, optimizer, first, step):
    """Gradients are reduced with the last micro-batch, as torch's documentation has it."""
    for batch in shares(stream(6), first, step):
        for i in range(3):
            if step > 1:
                model.set_requires_gradient_sync(i == 2)
            inputs, labels = part(batch, slice(i, None, 3))
            (F.cross_entropy(model(inputs), labels) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["last_loss_terms"] == SIZE


BY_ROW = {
    "split_dim": 1, "trace_thresholds": (0.0, 0.0), "update_interval": 2, "max_update_ratio": None,
}  # fmt: skip
IN_PARTS = {**BY_ROW, "split_dim": 3, "parts": True}  # the one process has a layer for each shard
IN_LAYERS = {**IN_PARTS, "inner": tuple(f"layers.{i}" for i in range(7))}
IN_LOOPS = {**BY_ROW, "inner": ("1", "3"), "rtol": 1e-4, "atol": 1e-6}
BOUNDED_MUON = {"method": ThorMuon, "max_update_ratio": 0.001, "lr": 0.5}
CASES = {
    "whole shards": {**IN_PARTS, "split_dim": None},
    "running average": {**IN_PARTS, "factor_decay": 0.5, "lr": 0.5, "max_update_ratio": 0.01},
    "ThorMuon, all steps bounded": {**IN_PARTS, **BOUNDED_MUON},
    "uneven batches": {**IN_PARTS, "go": uneven},
    "checkpointed": {**IN_LAYERS, "make": Checkpointed},
    "shared": {**BY_ROW, "make": Shared},
    "reduced once": {**IN_LOOPS, "go": reduced_once},
}


def as_shards(rank, world, go=ordinary, **options):
    options = {"make": linear, "rtol": 1e-9, "atol": 1e-12, **options}
    as_one_process(rank, world, go, way=(world,), **options)


@pytest.mark.parametrize("name", marked(CASES, slow=("uneven batches", "running average")))
def test_equals_one_process(run, name):
    for world in (2, 4):
        run(world, functools.partial(as_shards, **CASES[name]))


def mixed(rank, world, method):
    """The policy computes in bfloat16; factors, weights and momentum stay in float32."""
    options = {**BY_ROW, "make": lambda: linear(torch.float32), "method": method, "lr": 0.005}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, optimizer = made((world,), fsdp={"mp_policy": policy}, **options)
    twin, other = single(**options)
    batches = list(stream(5, torch.float32))
    loss = lambda x, labels: F.cross_entropy(x.float(), labels)  # noqa: E731
    train(model, optimizer, shares(batches, rank, world), loss)
    with torch.autocast("cpu", torch.bfloat16):
        train(twin, other, batches)
    for layer in optimizer.curvature.values():
        tensors = filter(torch.is_tensor, layer.state.values())
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert_same_weights(model, twin, rtol=0.05, atol=0.02)  # bfloat16 has 8 bits


@pytest.mark.parametrize("method", [THOR, ThorMuon])
def test_mixed_precision(run, method):
    run(2, mixed, method)
