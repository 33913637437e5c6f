"""THOR under FSDP2 in the cases of users: precision, checkpointing of activations, batches and layers that differ."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from joined import OPTIONS, mean_loss, part, share, stream
from sharded import GLOBAL, in_row_parts, joined_parts, mesh_of, whole_weights
from torch_thor import THOR, Distributed

BOTH = {**OPTIONS, **GLOBAL, "split_dim": 3, "trace_thresholds": (0.0, 0.0), "update_interval": 2}


def rows_of(batch):
    return batch[0].flatten(1)[:, :8]


def hidden(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 5)).to(dtype)


def assert_same(model, twin, **rounding):
    ours = whole_weights(model)
    for name, theirs in joined_parts(twin).items():
        torch.testing.assert_close(ours[name], theirs, **rounding, msg=lambda m, at=name: f"{at}: {m}")


def uneven(batch, rank, world):
    """The last rank has one example, the others share the rest."""
    last = part(batch, slice(0, 1))
    return last if rank == world - 1 else share(part(batch, slice(1, None)), rank, world - 1)


def uneven_batches(rank, world):
    """Each rank divides its summed loss by ΣN / P, so that every example has the same weight."""
    twin, model = in_row_parts(hidden(), world), fully_shard(hidden(), mesh=mesh_of((world,)))
    optimizer, its_optimizer = THOR(model, **BOTH), THOR(twin, **BOTH, distributed=Distributed(process_group=False))
    for batch in stream(6):
        inputs, labels = uneven(batch, rank, world)
        terms = len(batch[1]) // world
        optimizer.loss_terms = terms
        (F.cross_entropy(model(rows_of(inputs)), labels, reduction="sum") / terms).backward()
        mean_loss(twin(rows_of(batch[0])), batch[1]).backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    assert_same(model, twin, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_batches(run, world):
    run(world, uneven_batches)


class TwoHeads(nn.Module):
    """Each example uses one of two heads, so on some steps a rank does not use one of them."""

    def __init__(self, world=None):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
        self.unused = nn.Linear(6, 4)

    def forward(self, x, which):
        x = torch.tanh(self.trunk(x))
        outputs = x.new_zeros(len(x), 5)
        for i, head in enumerate(self.heads):
            outputs[which == i] = head(x[which == i])
        return outputs


def a_head_for_each_rank(rank, world):
    """Examples are sorted, so that a head is used by some ranks alone; it has rows on all."""
    twin, model = in_row_parts(TwoHeads().double(), world), fully_shard(TwoHeads().double(), mesh=mesh_of((world,)))
    optimizer, its_optimizer = THOR(model, **BOTH), THOR(twin, **BOTH, distributed=Distributed(process_group=False))
    for (pixels, _), labels in stream(6):
        x, which = pixels.flatten(1)[:, :8], (torch.arange(len(labels)) >= len(labels) // 2).long()
        own = slice(rank * len(labels) // world, (rank + 1) * len(labels) // world)
        optimizer.loss_terms, its_optimizer.loss_terms = len(labels) // world, len(labels)
        mean_loss(model(x[own], which[own]), labels[own]).backward()
        mean_loss(twin(x, which), labels).backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    assert_same(model, twin, rtol=1e-9, atol=1e-12)
    return {name: layer.refreshes for name, layer in optimizer.curvature.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_without_examples_on_some_ranks(run, world):
    for refreshes in run(world, a_head_for_each_rank):
        assert refreshes == {"trunk": 3, "heads.0": 3, "heads.1": 3, "unused": 0}


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = hidden(), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def checkpointed(rank, world, reentrant):
    twin = in_row_parts(Checkpointed(reentrant), world)
    model = Checkpointed(reentrant)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of((world,)))
    fully_shard(model, mesh=mesh_of((world,)))
    optimizer, its_optimizer = THOR(model, **BOTH), THOR(twin, **BOTH, distributed=Distributed(process_group=False))
    for batch in stream(6):
        inputs, labels = share(batch, rank, world)
        mean_loss(model(rows_of(inputs).requires_grad_()), labels).backward()
        mean_loss(twin(rows_of(batch[0]).requires_grad_()), batch[1]).backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    assert_same(model, twin, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_activation_checkpointing(run, reentrant):
    run(2, checkpointed, reentrant)


def mixed(rank, world, scaling):
    """The policy computes in bfloat16; factors, weights and momentum stay in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twin, model = hidden(torch.float32), fully_shard(hidden(torch.float32), mesh=mesh_of((world,)), mp_policy=policy)
    options = {**BOTH, "split_dim": 1, "scaling": scaling, "lr": 0.01}
    optimizer, its_optimizer = (
        THOR(model, **options),
        THOR(twin, **options, distributed=Distributed(process_group=False)),
    )
    losses = []
    for batch in stream(5):
        inputs, labels = share(batch, rank, world)
        mean_loss(model(rows_of(inputs).float()).float(), labels).backward()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(twin(rows_of(batch[0]).float()), batch[1])
        loss.backward()
        losses.append(loss.item())
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    for layer in optimizer.curvature.values():
        tensors = [value for value in layer.state.values() if isinstance(value, torch.Tensor)]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert_same(model, twin, rtol=0.05, atol=0.02)  # bfloat16 has 8 bits


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_mixed_precision(run, scaling):
    run(2, mixed, scaling)


class TwoCalls(nn.Module):
    """A weight that is used twice, and one that two modules share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.last_but_one(torch.tanh(self.first(x)))))

    def last_but_one(self, x):
        return self.second(torch.tanh(self.first(x)))


def shared_and_frozen(rank, world, frozen):
    twin, model = TwoCalls().double(), TwoCalls().double()
    for one in (twin, model):
        one.get_parameter(frozen).requires_grad_(False)
    fully_shard(model, mesh=mesh_of((world,)))
    options = {**BOTH, "split_dim": 1}
    optimizer, its_optimizer = (
        THOR(model, **options),
        THOR(twin, **options, distributed=Distributed(process_group=False)),
    )
    for batch in stream(6):
        inputs, labels = share(batch, rank, world)
        mean_loss(model(rows_of(inputs)), labels).backward()
        mean_loss(twin(rows_of(batch[0])), batch[1]).backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    assert_same(model, twin, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("frozen", ["last.weight", "last.bias", "first.weight"])
def test_shared_and_frozen_weights(run, frozen):
    run(2, shared_and_frozen, frozen)


def bits(model, optimizer):
    """Every bit that this rank holds: whole weights, and its rows of the state."""
    found = [parameter.to_local().tolist() for parameter in model.parameters()]
    for parameter in model.parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            value = value.to_local() if isinstance(value, DTensor) else value
            found.append((key, value.tolist() if torch.is_tensor(value) else value))
    return found


def replicas(rank, world, scaling):
    warnings.simplefilter("ignore")
    model = fully_shard(hidden(torch.float32), mesh=mesh_of((2, 2)))
    optimizer = THOR(model, **{**OPTIONS, "scaling": scaling, "update_interval": 7, "lr": None})
    for batch in stream(50):
        inputs, labels = share(batch, rank, world)
        mean_loss(model(rows_of(inputs).float()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(model, optimizer)


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_replicas_of_hsdp_have_the_same_bits_after_fifty_steps(run, scaling):
    """The mesh is ((0, 1), (2, 3)): ranks 0 and 2 hold the same rows."""
    first, second, third, fourth = run(4, replicas, scaling)
    assert (first, second) == (third, fourth)
    assert first != second


def with_a_closure(rank, world, scaling):
    """Lightning passes a closure, which resets the gradients between the forward and the backward pass."""
    twin, model = hidden(), hidden()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh_of((world,)))
    fully_shard(model, mesh=mesh_of((world,)))
    options = {**BOTH, "split_dim": 1, "scaling": scaling}
    optimizer = THOR(model, **options, distributed=Distributed(whole_matrices=scaling is not None))
    its_optimizer = THOR(twin, **options, distributed=Distributed(process_group=False))

    def closure_of(model, optimizer, batch):
        def closure():
            loss = mean_loss(model(rows_of(batch[0])), batch[1])
            optimizer.zero_grad()
            loss.backward()
            return loss

        return closure

    for batch in stream(7):
        optimizer.step(closure_of(model, optimizer, share(batch, rank, world)))
        its_optimizer.step(closure_of(twin, its_optimizer, batch))
    assert_same(model, twin, rtol=1e-4, atol=1e-6)
    return [layer.refreshes for layer in optimizer.curvature.values()]


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_a_closure_that_resets_gradients_after_the_forward_pass(run, scaling):
    for refreshes in run(2, with_a_closure, scaling):
        assert refreshes == [4, 4, 4]


def reduced_once(rank, world, scaling):
    """Accumulation as torch's documentation has it: gradients are reduced with the last micro-batch alone."""
    twin, model = hidden(), fully_shard(hidden(), mesh=mesh_of((world,)))
    options = {**BOTH, "split_dim": 1, "scaling": scaling}
    optimizer = THOR(model, **options, distributed=Distributed(whole_matrices=scaling is not None))
    its_optimizer = THOR(twin, **options, distributed=Distributed(process_group=False))
    for batch in stream(6):
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            inputs, labels = part(share(batch, rank, world), slice(i, None, 3))
            (mean_loss(model(rows_of(inputs)), labels) / 3).backward()
        mean_loss(twin(rows_of(batch[0])), batch[1]).backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    assert_same(model, twin, rtol=1e-4, atol=1e-6)
    return optimizer.param_groups[0]["last_loss_terms"]


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_gradients_that_are_reduced_with_the_last_micro_batch(run, scaling):
    assert set(run(2, reduced_once, scaling)) == {12 if scaling is None else 0}
