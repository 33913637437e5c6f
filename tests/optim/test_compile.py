"""`torch.compile` before or after THOR, of the model or a part: ordinary steps run compiled, refreshes eagerly."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from tiny import leave_no_listeners, listened_to
from torch_thor import THOR

STEPS, INTERVAL = 9, 4


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
    """Nothing compiled, and no optimizer of another test (one that failed keeps its locals) that waits."""
    torch._dynamo.reset()
    gc.collect()
    leave_no_listeners()
    yield
    torch._dynamo.reset()


def stance():
    return torch._dynamo.eval_frame._stance.stance


def stream(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 5, 6, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(count)
    ]


def train(call, optimizer, counter=None):
    frames = []
    for x, labels in stream():
        functional.cross_entropy(call(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        frames.append(counter.frame_count if counter else 0)
    return frames


def prepared(how, model, counter):
    """The callable to train with, and the optimizer."""
    options = {"backend": counter, "fullgraph": True}  # fullgraph: a graph break is an error
    thor = {"update_interval": INTERVAL, "trace_thresholds": (0.0, 0.0)}
    if how == "compiled after":
        optimizer = THOR(model, **thor)
        return torch.compile(model, **options), optimizer
    if how == "compiled before":
        return torch.compile(model, **options), THOR(model, **thor)
    if how == "THOR of the compiled":
        compiled = torch.compile(model, **options)
        return compiled, THOR(compiled, **thor)
    if how == "compiled and called before":
        compiled = torch.compile(model, **options)
        compiled(stream(1)[0][0]).sum().backward()
        model.zero_grad()
        return compiled, THOR(model, **thor)
    if how == "in place":
        model.compile(**options)
        return model, THOR(model, **thor)
    assert how == "a part"
    model.body.compile(**options)
    return model, THOR(model, **thor)


WAYS = [
    "compiled after",
    "compiled before",
    "THOR of the compiled",
    "compiled and called before",
    "in place",
    "a part",
]


@pytest.mark.parametrize("how", WAYS)
def test_compiled_equals_eager_with_one_graph(how):
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    counter = CompileCounter()
    call, optimizer = prepared(how, model, counter)
    frames = train(call, optimizer, counter)
    other = THOR(twin, update_interval=INTERVAL, trace_thresholds=(0.0, 0.0))
    train(twin, other)
    assert frames[1:] == [1] * (STEPS - 1), "compiled once, for the first ordinary step, and never again"
    for name, one in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), one, msg=name)
    refreshes = {c.refreshes for name, c in optimizer.curvature.items() if not name.endswith("unused")}
    assert refreshes == {3}


@pytest.mark.slow
def test_inductor_has_no_hook_of_ours():
    """The real compiler: what it compiled for an ordinary step is what it compiles without THOR."""
    model = Model()
    optimizer = THOR(model, update_interval=100)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(compiled, optimizer)
    assert not listened_to(model)


def test_the_compiler_is_left_alone_between_refreshes():
    model = Model()
    assert stance() == "default"
    optimizer = THOR(model, update_interval=3)
    seen = []
    for x, labels in stream(7):
        seen.append(stance())
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == ["force_eager", "default", "default"] * 2 + ["force_eager"]


def test_an_optimizer_that_is_dropped_wants_nothing():
    gc.disable()
    try:
        optimizer, other = THOR(Model()), THOR(Model())
        assert stance() == "force_eager"
        del optimizer
        assert stance() == "force_eager"
        del other
        assert stance() == "default"
    finally:
        gc.enable()


def test_the_users_stance_comes_back():
    with torch.compiler.set_stance("eager_on_recompile"):
        model = Model()
        optimizer = THOR(model, update_interval=100)
        assert stance() == "force_eager"
        x, labels = stream(1)[0]
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        assert stance() == "eager_on_recompile"


@pytest.mark.parametrize("leaves", ["before the step", "after the step"])
def test_a_stance_that_is_entered_while_thor_waits(leaves):
    """It holds inside its context, and what held before it, once the step is done."""
    model = Model()
    optimizer = THOR(model, update_interval=100)
    assert stance() == "force_eager"
    x, labels = stream(1)[0]
    with torch.compiler.set_stance("eager_on_recompile"):
        functional.cross_entropy(model(x), labels).backward()
        if leaves == "after the step":
            optimizer.step()
            assert stance() == "eager_on_recompile"
    if leaves == "before the step":
        assert stance() == "force_eager"
        optimizer.step()
    assert stance() == "default"


def test_a_stance_that_is_set_while_thor_waits_stays():
    model = Model()
    optimizer = THOR(model, update_interval=2)
    torch.compiler.set_stance("eager_on_recompile")
    try:
        seen = []
        for x, labels in stream(4):
            functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(stance())
        assert seen == ["eager_on_recompile", "force_eager"] * 2
    finally:
        del optimizer
        gc.collect()
        torch.compiler.set_stance("default")


def test_a_stance_whose_context_ends_while_thor_waits_is_over():
    model = Model()
    with torch.compiler.set_stance("eager_on_recompile"):
        optimizer = THOR(model, update_interval=100)
    x, labels = stream(1)[0]
    functional.cross_entropy(model(x), labels).backward()
    optimizer.step()
    assert stance() == "default"


def test_compiled_models_run_without_a_warning_while_thor_waits():
    """Torch warns of global hooks on each call of a compiled model; ours are no matter of its user."""
    model = Model()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        optimizer = THOR(model, update_interval=2)
        for x, labels in stream(4):
            functional.cross_entropy(compiled(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert warnings.filters != before  # the next step refreshes
        del optimizer
        gc.collect()
        assert warnings.filters == before
    assert not torch.nn.modules.module._has_any_global_hook()


def test_a_layer_that_is_used_late_is_refreshed_when_it_is():
    """It keeps nobody from running compiled while it waits, gets a plain gradient once, and its factors next."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.late = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, late):
            y = self.first(x)
            return self.late(y) if late else y

    model = Late()
    optimizer = THOR(model, update_interval=100, momentum=0.0)
    compiled = torch.compile(model, backend=CompileCounter(), fullgraph=True)
    refreshes = []
    for step, (x, _) in enumerate(stream(6)):
        compiled(x, step >= 3).square().mean().backward()
        assert not optimizer._registry.capture.inside_transform, "the compiler has traced a hook of ours"
        optimizer.step()
        optimizer.zero_grad()
        refreshes.append(optimizer.curvature["late"].refreshes)
    assert refreshes == [0, 0, 0, 0, 1, 1]
    assert stance() == "default"


def test_statistics_that_never_come_are_an_error_with_the_cause():
    """A stance of the user's own, set after THOR armed its layers, lets compiled code run on a refresh step."""
    model = Model()
    compiled = torch.compile(model, backend="eager")
    compiled(stream(1)[0][0]).sum().backward()
    model.zero_grad()
    optimizer = THOR(model)
    with torch.compiler.set_stance("default"):
        functional.cross_entropy(compiled(stream(1)[0][0]), stream(1)[0][1]).backward()
    with pytest.raises(RuntimeError, match=r"no statistics.*compiled"):
        optimizer.step()
