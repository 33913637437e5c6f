"""THOR and ThorMuon under FSDP2 and HSDP take the steps of one process that cuts its blocks at the same places.

Blocks of one row are cut alike however rows are divided. With larger blocks, the reference has a layer for each shard.
An ordinary step sends nothing, or what its option needs.
"""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.debug import CommDebugMode

from joined import as_one_process, linear, network, own, shares, stream, train, world_of
from torch_thor import ThorMuon

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a view")
TWO, HSDP = (2,), (2, 2)


class Free(nn.Module):
    """A matrix without a kind, experts whose matrices are numbered, and a convolution; tall and wide, fused weights."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 2)
        self.free = nn.Parameter(torch.randn(9, 7) / 3)
        self.numbered = nn.Parameter(torch.randn(3, 7, 4) / 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.tokens = nn.Embedding(11, 8)
        self.rows = nn.Linear(80, 9)
        self.tall = nn.Linear(4, 13)
        self.head = nn.Linear(13, 5)

    def forward(self, batch):
        pixels, words = batch
        x = self.tokens(words)
        x = self.attention(x, x, x, need_weights=False)[0].mean(1)
        x = self.rows(torch.cat([torch.tanh(self.conv(pixels)).flatten(1)[:, :72], x], dim=1)) @ self.free
        x = torch.einsum("bi,eij->bj", torch.tanh(x), self.numbered)
        return self.head(torch.tanh(self.tall(x)))


def free():
    torch.manual_seed(0)
    return Free().double()


def sharded(rank, world, make=network, layers=(), micro=1, skipped=(), **options):
    """Returns the kinds of decisions, and the numbers of collectives that ordinary steps have started."""
    sent = []

    def go(model, optimizer, first, step):
        numbers = iter(range(8))
        sent.append([])  # of the ranks, then of the one process

        def counted(optimizer):
            if next(numbers) in skipped and first == step - 1:
                own(next(model.parameters()).grad).fill_(torch.nan)
            with CommDebugMode() as counter:
                optimizer.step()
            if not optimizer.last_refresh:
                sent[-1].append(counter.get_total_counts())

        decisions = train(
            model, optimizer, shares(stream(8), first, step), micro=micro if step > 1 else 1, step=counted
        )
        assert optimizer.skipped_steps == len(skipped)
        return decisions

    # shards leave out the convolution of two groups by themselves
    options = {"max_update_ratio": None, "split_dim": 1, "layers": [*layers] or None, **options}
    twin = {"layers": [*layers, "-images.3"] if make is network else options["layers"]}
    decisions, _ = as_one_process(rank, world, go, make, twin=twin, **options)
    return {kind for step in decisions for kind in step.values()}, set(sent[0])


MUON = {"method": ThorMuon, "damping": 0.1, "layers": ["-attention.v_proj"], "rtol": 1e-6, "atol": 1e-8}
# with whole matrices, blocks of rows are those of one process, however shards divide them
WHOLE = {"make": free, "inner": (), "method": ThorMuon, "lr": 0.05, "damping": 0.1, "rtol": 1e-4, "atol": 1e-6}
WHOLE |= {"distributed": {"whole_matrices": True}, "split_dim": 4}
SKIPPED = {"nonfinite": "skip", "skipped": (0, 4)}  # steps 0 and 1 would refresh, and step 4 is ordinary
CASES = {  # the mesh, options, and how many collectives an ordinary step starts
    "fsdp-1": ((1,), {}, 0),
    "fsdp-2": (TWO, {}, 0),
    "fsdp-4": ((4,), {}, 0),
    "hsdp": (HSDP, {}, 0),
    "replicas alone": ((2, 1), {}, 0),
    "accumulation": (TWO, {"weight_decay": 0.1, "micro": 3}, 0),
    "accumulation, hsdp": (HSDP, {"weight_decay": 0.1, "micro": 3}, 0),
    "running average": (TWO, {"factor_decay": 0.6, "nesterov": True}, 0),
    "ThorMuon": (TWO, MUON, 0),
    "ThorMuon, hsdp": (HSDP, MUON, 0),
    "kept after forward": (TWO, {"momentum": 0.0, "fsdp": {"reshard_after_forward": False}}, 0),
    "cpu offload": (TWO, {"fsdp": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}, 0),
    # all agree that they take the step, then the sum
    "bounded by kl_clip": (TWO, {"kl_clip": 1e-4}, 2),
    "bounded by kl_clip, hsdp": (HSDP, {"kl_clip": 1e-4}, 2),
    "a gradient is not finite on one rank": (TWO, SKIPPED, 1),
    "a gradient is not finite on one rank, hsdp": (HSDP, SKIPPED, 1),
    # all agree; there and back
    "whole matrices": (TWO, {**WHOLE, "split_dim": None, "nesterov": False}, 3),
    "whole matrices, one shard": ((1,), WHOLE, 2),
    "whole matrices, shards without rows": ((4,), WHOLE, 3),
    # and the norms of the weights
    "whole matrices, bounded, hsdp": (
        HSDP,
        {**WHOLE, "weight_decay": 0.1, "layers": ["-attention.k_proj"], "max_update_ratio": 0.15},
        4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_and_sends_only_what_it_must(run, name):
    mesh, options, collectives = CASES[name]
    for kinds, sent in run(world_of(mesh), functools.partial(sharded, way=mesh, **options)):
        assert sent == {collectives}
        assert options or kinds == {"UPDATE", "KEEP", "STOP"}


def with_a_layer_for_each_shard(rank, world, **options):
    def go(model, optimizer, first, step):
        optimizers.append(optimizer)
        return train(model, optimizer, shares(stream(6), first, step))

    optimizers = []
    options = {"split_dim": 3, "trace_thresholds": (0.0, 0.0), "update_interval": 2, **options}
    as_one_process(rank, world, go, linear, way=(world,), parts=True, rtol=1e-9, atol=1e-12, **options)
    layers = optimizers[0].curvature.items()
    return {name: [None if m is None else len(m) for m in one.factors()] for name, one in layers}


OPTIONS = {
    "bounded": {"max_update_ratio": 0.01},
    "whole shards": {"max_update_ratio": None, "split_dim": None},
    "running average": {"factor_decay": 0.5, "lr": 0.5},
    "ThorMuon, all steps bounded": {"method": ThorMuon, "max_update_ratio": 0.001, "lr": 0.5},
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_one_process_with_a_layer_for_each_shard(run, world, name):
    for shapes in run(world, functools.partial(with_a_layer_for_each_shard, **OPTIONS[name])):
        wanted = {"1": [8, 11], "3": [11, 7], "5": [7, 5], "7": [5, 5]}
        assert shapes == ({n: [a, None] for n, (a, _) in wanted.items()} if "method" in OPTIONS[name] else wanted)
