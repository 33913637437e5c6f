"""FSDP2 in the cases of users: precision, checkpointing of activations, batches, layers and loops that differ."""

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
    alone,
    as_one_process,
    assert_same_weights,
    digest,
    linear,
    made,
    part,
    shares,
    stream,
    sum_over,
    train,
)
from torch_thor import THOR, ThorMuon

BY_ROW = {"split_dim": 1, "trace_thresholds": (0.0, 0.0), "update_interval": 2, "max_update_ratio": None}
IN_PARTS = {**BY_ROW, "split_dim": 3, "parts": True}  # the one process has a layer for each shard
METHODS = [THOR, ThorMuon]


def ordinary(model, optimizer, first, step):
    return train(model, optimizer, shares(stream(6), first, step))


def uneven(model, optimizer, first, step):
    """The last rank has one example, the others share the rest. Every example has the same weight."""
    batches = list(stream(6))
    if step > 1:
        others = shares([part(batch, slice(1, None)) for batch in batches], first, step - 1)
        batches = [part(batch, slice(0, 1)) for batch in batches] if first == step - 1 else others
    optimizer.loss_terms = SIZE // step
    return train(model, optimizer, batches, loss=sum_over(SIZE // step))


class TwoHeads(nn.Module):
    """The second half of the examples uses another head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.trunk, self.unused = Rows(), nn.Linear(8, 6), nn.Linear(6, 4)
        self.heads = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
        self.double()

    def forward(self, batch):
        x, which = torch.tanh(self.trunk(self.rows(batch))), batch[1][:, 0]
        outputs = x.new_zeros(len(x), 5)
        for i, head in enumerate(self.heads):
            outputs[which == i] = head(x[which == i])
        return outputs


def a_head_for_each_rank(model, optimizer, first, step):
    """A head is used by some ranks alone; it has rows on all."""
    batches = list(stream(6))
    for (_, words), _ in batches:
        words[:, 0] = torch.arange(SIZE) >= SIZE // 2
    own = slice(first * SIZE // step, (first + 1) * SIZE // step)
    optimizer.loss_terms = SIZE // step
    train(model, optimizer, [part(batch, own) for batch in batches])
    refreshes = {name.partition(".parts")[0]: layer.refreshes for name, layer in optimizer.curvature.items()}
    assert refreshes == {"trunk": 3, "heads.0": 3, "heads.1": 3, "unused": 0}


class Shared(nn.Module):
    """A weight that is used twice, and one that two modules share; one parameter is frozen."""

    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.first, self.second, self.last = Rows(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.second.weight = self.first.weight
        self.double().get_parameter(frozen).requires_grad_(False)

    def forward(self, batch):
        x = torch.tanh(self.first(torch.tanh(self.first(self.rows(batch)))))
        return self.last(torch.tanh(self.second(x)))


EACH = {"inner": tuple(f"layers.{i}" for i in range(7))}
CASES = {
    "uneven batches": {"go": uneven, "make": linear, **IN_PARTS},
    "a layer without examples on some ranks": {"go": a_head_for_each_rank, "make": TwoHeads, **IN_PARTS},
    "checkpointed": {"make": functools.partial(Checkpointed, False), **EACH, **IN_PARTS},
    "checkpointed, reentrant": {"make": functools.partial(Checkpointed, True), **EACH, **IN_PARTS},
    "shared": {"make": functools.partial(Shared, "last.weight"), **BY_ROW},
    "shared, frozen bias": {"make": functools.partial(Shared, "last.bias"), **BY_ROW},
    "shared and frozen": {"make": functools.partial(Shared, "first.weight"), **BY_ROW},
}


def as_shards(rank, world, go=ordinary, **options):
    as_one_process(rank, world, go, way=(world,), rtol=1e-9, atol=1e-12, **options)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(run, world, name):
    run(world, functools.partial(as_shards, **CASES[name]))


def mixed(rank, world, method):
    """The policy computes in bfloat16; factors, weights and momentum stay in float32."""
    options = {**BY_ROW, "make": lambda: linear(torch.float32), "method": method, "lr": 0.005}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (model, optimizer), (twin, other) = made((world,), fsdp={"mp_policy": policy}, **options), alone(**options)
    batches = list(stream(5, torch.float32))
    train(model, optimizer, shares(batches, rank, world), loss=lambda x, labels: F.cross_entropy(x.float(), labels))
    with torch.autocast("cpu", torch.bfloat16):
        train(twin, other, batches)
    for layer in optimizer.curvature.values():
        assert {value.dtype for value in layer.state.values() if torch.is_tensor(value)} == {torch.float32}
    assert_same_weights(model, twin, rtol=0.05, atol=0.02)  # bfloat16 has 8 bits


@pytest.mark.parametrize("method", METHODS)
def test_mixed_precision(run, method):
    run(2, mixed, method)


def replicas(rank, world, method):
    options = {"method": method, "update_interval": 7, "lr": 0.05}
    model, optimizer = made((2, 2), lambda: linear(torch.float32), **options)
    train(model, optimizer, shares(stream(50, torch.float32), rank, world))
    return digest(model, optimizer)


@pytest.mark.parametrize("method", METHODS)
def test_replicas_of_hsdp_have_the_same_bits_after_fifty_steps(run, method):
    """The mesh is ((0, 1), (2, 3)): ranks 0 and 2 hold the same rows."""
    first, second, third, fourth = run(4, replicas, method)
    assert (first, second) == (third, fourth)
    assert first != second


def with_a_closure(model, optimizer, first, step):
    """Lightning passes a closure, which resets the gradients between the forward and the backward pass."""
    decisions = []
    for inputs, labels in shares(stream(7), first, step):

        def closure(inputs=inputs, labels=labels):
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
        decisions.append({event.layer: event.decision for event in optimizer.last_refresh})
    assert [len(of_step) for of_step in decisions] == [4, 0, 4, 0, 4, 0, 4]
    return decisions


def reduced_once(model, optimizer, first, step):
    """Accumulation as torch's documentation has it: gradients are reduced with the last micro-batch alone."""
    for batch in shares(stream(6), first, step):
        for i in range(3):
            if step > 1:
                model.set_requires_gradient_sync(i == 2)
            inputs, labels = part(batch, slice(i, None, 3))
            (F.cross_entropy(model(inputs), labels) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["last_loss_terms"] == (12 if "G" in optimizer.sides else 0)


def in_a_loop(rank, world, go, method):
    options = {**BY_ROW, "make": linear, "inner": ("1", "3"), "method": method, "rtol": 1e-4, "atol": 1e-6}
    distributed = {"whole_matrices": method is ThorMuon}
    as_one_process(rank, world, go, way=(world,), distributed=distributed, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("go", [with_a_closure, reduced_once])
def test_loops_of_other_trainers(run, go, method):
    run(2, in_a_loop, go, method)
