"""`torch.compile` of models and of functions with a step: the weights of eager, compiled once."""

import copy
import gc
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.nn import functional

from tiny import leave_no_listeners, listened_to
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

STEPS = 9

# Torch 2.9 compiles a function anew when an option of an optimizer that it calls has changed, such
# as lr; what it computes is the same.
GUARDS_OPTIONS = torch.__version__ < "2.14"
never_compiles_again = pytest.mark.skipif(GUARDS_OPTIONS, reason="compiled anew by torch 2.9")


class Body(nn.Sequential):
    """With a forward outside of torch: torch 2.9 compiles no part whose forward is torch's own."""

    def forward(self, x):
        return super().forward(x)


class Model(nn.Module):
    """Linear layers and an attention, and a layer that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.body = Body(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x + self.attention(x, x, x, need_weights=False)[0]).mean(1)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing is compiled, and no optimizer of another test waits."""
    torch._dynamo.reset()
    gc.collect()
    leave_no_listeners()
    counters.clear()
    yield
    torch._dynamo.reset()


def stance():
    return torch._dynamo.eval_frame._stance.stance


def stream(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 5, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


def step(call, optimizer, batch):
    x, labels = batch
    functional.cross_entropy(call(x), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def in_place(part, model, options):
    part.compile(**options)
    return model


# what is called
WAYS = {
    "a model": lambda model, options: torch.compile(model, **options),
    "in place": lambda model, options: in_place(model, model, options),
    "a part": lambda model, options: in_place(model.body, model, options),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("first", ["compiled", "optimizer"])
def test_a_compiled_model_equals_eager_with_one_graph(how, first):
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    counter = CompileCounter()
    thor = partial(THOR, update_interval=4, trace_thresholds=(0.0, 0.0))
    optimizer = thor(model) if first == "optimizer" else None
    # fullgraph: a graph break is an error
    call = WAYS[how](model, {"backend": counter, "fullgraph": True})
    optimizer = optimizer or thor(call if how == "a model" else model)
    other, frames = thor(twin), []
    for batch in stream():
        step(call, optimizer, batch)
        step(twin, other, batch)
        frames.append(counter.frame_count)
    assert frames[1:] == [1] * (STEPS - 1), "compiled once, for the first ordinary step"
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, msg=name)
    layers = optimizer.curvature.items()
    assert {layer.refreshes for name, layer in layers if not name.endswith("unused")} == {3}


@pytest.mark.parametrize("own", ["default", "eager_on_recompile"])
def test_hooks_and_the_stance_between_refreshes_are_the_users_own(own):
    """Compiled models run without torch's warning of global hooks, and none is left."""
    model, seen = Model(), []
    compiled = torch.compile(model, backend="eager")
    with torch.compiler.set_stance(own), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = THOR(model, update_interval=3)
        for batch in stream(7):
            seen.append((stance(), bool(listened_to(model))))
            step(compiled, optimizer, batch)
    assert seen == [("force_eager", True), (own, False), (own, False)] * 2 + [("force_eager", True)]
    del optimizer
    assert not torch.nn.modules.module._has_any_global_hook()


# ---- functions with a step: each gets a model, its optimizer and what compiles -------------------

OPTIONS = {
    THOR: {"update_interval": 3, "trace_thresholds": (0.0, 0.0)},
    ThorMuon: {"update_interval": 3},
    LAMB: {"lr": 0.05},
    AGCSGD: {"lr": 0.05, "momentum": 0.9},
}
CURVATURE = [THOR, ThorMuon]


def loss_of(model, x):
    return model(x).square().mean()


def with_compiler(function):
    return torch.compile(function, backend="aot_eager")


def whole(model, optimizer, comp):
    def train(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    return comp(train)


def beside_the_step(model, optimizer, comp):
    step = comp(optimizer.step)

    def train(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        step()

    return train


def trained(kind, way, comp, rows, options):
    """The weights after the training, and what had been compiled after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = kind(model, **{**OPTIONS[kind], **options})
    train, counts = way(model, optimizer, comp), []
    for count in rows:
        train(torch.randn(count, 4))
        counts.append(counters["frames"]["total"])  # asked for so far
    if kind in CURVATURE:
        assert optimizer.curvature["0"].refreshes >= 2
    return [p.detach().clone() for p in model.parameters()], counts


def assert_as_eager(kind, way, rows=(16,) * STEPS, **options):
    want, _ = trained(kind, way, lambda f: f, rows, options)
    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    found, counts = trained(kind, way, with_compiler, rows, options)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    return counts


def test_a_compiled_step_beside_an_eager_pass_trains_as_an_eager_step():
    counts = assert_as_eager(THOR, beside_the_step)  # steps 0, 3, 6 and 9 refresh
    again = counts[1:] != counts[1:2] * (STEPS - 1)
    assert GUARDS_OPTIONS or not again, "compiled again"


@never_compiles_again
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_whole_step_has_one_graph_and_never_compiles_again(kind):
    """The graph of the loss, between the breaks of zero_grad(), backward() and step()."""
    options = {"update_interval": lambda step: 1 + step // 2} if kind in CURVATURE else {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_as_eager(kind, whole, **options)
    assert sum(counters["graph_break"].values()) <= 4
    assert counters["stats"]["unique_graphs"] == 1


@never_compiles_again
def test_batches_of_several_sizes_share_a_graph():
    counts = assert_as_eager(THOR, whole, rows=[16 - i % 5 for i in range(STEPS)])
    assert counts[2:] == counts[2:3] * (STEPS - 2)
    assert counters["stats"]["unique_graphs"] == 2, "the first size has its own graph"
