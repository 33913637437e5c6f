"""Rows count if the loss of the step reached them: passes that train nothing leave A as it was."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tiny import TakesAll
from torch_thor import THOR

every_optimizer = pytest.mark.parametrize(
    "make",
    [
        partial(one, split_dim=None, factor_decay=0.0, **options)
        for one, options in ((THOR, {"trace_thresholds": (0.0, 0.0)}), (TakesAll, {}))
    ],
    ids=["THOR", "ThorMuon"],
)


class Interrupts(nn.Module):
    """Raises an error in the pass in which it is told to."""

    armed = False

    def forward(self, x):
        if self.armed:
            raise KeyboardInterrupt
        return x


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Interrupts(), nn.Linear(6, 3)).double()


def data(seed, rows=8):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).double()


def moment(*parts):
    rows = torch.cat(parts)
    return rows.T @ rows / len(rows)


def train(model, x):
    model(x).square().mean().backward()


def evaluates_with_gradients(model):
    model(data(1))


def has_a_detached_target(model):
    target = model(data(1)).detach()
    (model(data(0)) - target).square().mean().backward()
    model.zero_grad()


def skips_a_micro_batch(model):
    loss = model(data(1)).square().mean()
    if loss > 0:  # found to be of no use
        return


def is_interrupted(model):
    model[2].armed = True
    with pytest.raises(KeyboardInterrupt):
        model(data(1))
    model[2].armed = False


def takes_a_gradient_of_the_input(model):
    x = data(1).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


@every_optimizer
@pytest.mark.parametrize(
    "meanwhile",
    [
        evaluates_with_gradients,
        has_a_detached_target,
        skips_a_micro_batch,
        is_interrupted,
        takes_a_gradient_of_the_input,
    ],
)
def test_a_pass_that_trains_nothing_leaves_no_rows(make, meanwhile):
    model = net()
    optimizer = make(model, update_interval=1)
    meanwhile(model)
    train(model, data(2))
    if meanwhile is not has_a_detached_target:  # which gives its own gradients up
        meanwhile(model)
    optimizer.step()
    factor = optimizer.curvature["0"].factors()[0]
    torch.testing.assert_close(factor, moment(data(2)), rtol=1e-12, atol=0)


@every_optimizer
def test_micro_batches_may_run_forward_before_they_run_back(make):
    """As in a pipeline: the rows of each count once, in whatever order their losses come."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 0)):
        model = net()
        optimizer = make(model, update_interval=1)
        losses = [model(data(seed)).square().mean() for seed in range(3)]
        for i in order:
            losses[i].backward()
        optimizer.step()
        factor = optimizer.curvature["0"].factors()[0]
        torch.testing.assert_close(factor, moment(*(data(i) for i in order)))


@every_optimizer
def test_a_weight_that_is_used_to_find_a_norm_is_no_row(make):
    """DoRA sends an identity matrix through its adapter, and detaches what comes out."""

    class NormOfIdentity(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            norm = self.inner(torch.eye(4, dtype=x.dtype)).detach().norm(dim=0)
            return self.inner(x) / norm

    torch.manual_seed(0)
    model = nn.Sequential(NormOfIdentity(), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = make(model, update_interval=1)
    train(model, data(2))
    optimizer.step()
    factor = optimizer.curvature["0.inner"].factors()[0]
    torch.testing.assert_close(factor, moment(data(2)))


def test_a_residual_of_derivatives_counts_all_points():
    """A physics-informed loss reaches its points by ``autograd.grad(create_graph=True)`` alone.

    Only A: the rows of G are gradients of outputs, and these points have none.
    """
    model = net()
    optimizer = TakesAll(model, update_interval=1, split_dim=None, factor_decay=0.0)
    inside, edge = data(1, 16).requires_grad_(), data(2)
    [slope] = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
    (slope.square().mean() + model(edge).square().mean()).backward()
    optimizer.step()
    factor = optimizer.curvature["0"].factors()[0]
    torch.testing.assert_close(factor, moment(inside.detach(), edge))


class Blocks(nn.Module):
    def __init__(self, depth, *, reentrant, head_inside, offload):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.head = nn.Linear(6, 3)
        self.reentrant, self.head_inside, self.offload = reentrant, head_inside, offload
        self.double()

    def forward(self, x):
        if self.offload:
            with save_on_cpu():
                return self.run(x)
        return self.run(x)

    def run(self, x):
        stages = [nn.Sequential(block, nn.Tanh()) for block in self.blocks]
        if self.head_inside:
            stages[-1].append(self.head)
        for stage in stages:
            x = checkpoint(stage, x, use_reentrant=self.reentrant) if self.recomputes else stage(x)
        return x if self.head_inside else self.head(x)

    recomputes = True


@every_optimizer
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("head_inside", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_and_recomputed_blocks_count_once(make, reentrant, head_inside, offload):
    model = Blocks(3, reentrant=reentrant, head_inside=head_inside, offload=offload)
    plain = copy.deepcopy(model)
    plain.recomputes = plain.offload = False
    optimizers = [make(one, update_interval=1) for one in (model, plain)]
    for step in range(2):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            for part in range(2):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + part))
                one(x.double().requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, layer in optimizers[0].curvature.items():
            for own, wanted in zip(
                layer.factors(), optimizers[1].curvature[name].factors(), strict=True
            ):
                torch.testing.assert_close(own, wanted, msg=f"{name} in step {step}")
        torch.testing.assert_close([*model.parameters()], [*plain.parameters()])


# ---- inputs of other layouts ---------------------------------------------------------------------


def sequences():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, 4, generator=generator).double() for n in (3, 1, 5)]


@every_optimizer
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_rows_of_nested_sequences_are_their_values(make, layout):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    plain = copy.deepcopy(model)
    one, other = (make(each, update_interval=1) for each in (model, plain))
    output = model(torch.nested.nested_tensor(sequences(), layout=layout))
    rows = output.values() if layout is torch.jagged else output.to_padded_tensor(0.0)
    (rows.square().sum() / 3).backward()
    (plain(torch.cat(sequences())).square().sum() / 3).backward()
    other.loss_terms = 3  # one term for each sequence
    one.step()
    other.step()
    torch.testing.assert_close(one.curvature["0"].factors()[0], moment(*sequences()))
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])


@every_optimizer
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_input_has_the_rows_of_a_dense_one(make, layout):
    """Bags of words: torch multiplies a sparse matrix by a dense weight."""

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)).double()
    plain = copy.deepcopy(model)
    one, other = (make(each, update_interval=1) for each in (model, plain))
    x = data(1) * (data(2) > 0)
    train(model, x.to_sparse(layout=layout))
    train(plain, x)
    one.step()
    other.step()
    torch.testing.assert_close(one.curvature["0"].factors(), other.curvature["0"].factors())
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])


# ---- what a refresh keeps ------------------------------------------------------------------------


def test_a_call_keeps_the_smaller_of_its_input_and_its_sum():
    """Of A alone, until its graph is freed: a small input, or no more than the input or A."""
    model = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 3))
    capture = TakesAll(model, update_interval=1, split_dim=None)._curvature.capture
    kept = []
    capture._on_gradient = lambda call, g: kept.append((call.layer.name, call.x is not None))
    for rows in (2, 250, 4000, 5000):
        model(torch.randn(rows, 4)).sum().backward()
    wanted = [("2", True), ("0", True), ("2", True), ("0", True)]
    assert kept == [*wanted, ("2", False), ("0", True), ("2", False), ("0", False)]
