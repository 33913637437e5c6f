"""`torch.compile` before or after THOR, of the model or a part: ordinary steps run compiled, refreshes eagerly.

Who listens and what becomes of the compiler's stance: tests/capture/test_module_calls.py.
"""

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
    """Linear layers and an attention; a layer that no loss reaches until `late` is set."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.body = Body(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        self.unused = nn.Linear(3, 3)

    def forward(self, x, late=False):
        y = self.body(x + self.attention(x, x, x, need_weights=False)[0]).mean(1)
        return self.unused(y) if late else y


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


def backward(call, batch, *args):
    functional.cross_entropy(call(batch[0], *args), batch[1]).backward()


def step(call, optimizer, batch, *args):
    backward(call, batch, *args)
    optimizer.step()
    optimizer.zero_grad()


def thor(model):
    return THOR(model, update_interval=INTERVAL, trace_thresholds=(0.0, 0.0))


def made(how, model, **options):
    """What is called, and its THOR."""
    if how == "after THOR":
        optimizer = thor(model)
        return torch.compile(model, **options), optimizer
    if how in ("in place", "a part"):
        (model if how == "in place" else model.body).compile(**options)
        return model, thor(model)
    compiled = torch.compile(model, **options)
    if how == "called before THOR":
        backward(compiled, stream(1)[0])
        model.zero_grad()
    return compiled, thor(compiled if how == "of the compiled" else model)


WAYS = ["after THOR", "before THOR", "called before THOR", "of the compiled", "in place", "a part"]


@pytest.mark.parametrize("how", WAYS)
def test_compiled_equals_eager_with_one_graph(how):
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    counter = CompileCounter()
    call, optimizer = made(how, model, backend=counter, fullgraph=True)  # fullgraph: a graph break is an error
    other, frames = thor(twin), []
    for batch in stream():
        step(call, optimizer, batch)
        step(twin, other, batch)
        frames.append(counter.frame_count)
    assert frames[1:] == [1] * (STEPS - 1), "compiled once, for the first ordinary step, and never again"
    for name, one in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), one, msg=name)
    refreshes = {c.refreshes for name, c in optimizer.curvature.items() if not name.endswith("unused")}
    assert refreshes == {3}


def test_the_compiler_is_left_alone_between_refreshes_and_when_the_optimizer_is_dropped():
    """No hook of ours is in what it compiles, its stance is the user's, and its warning of global hooks is silenced."""
    model = Model()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        optimizer, seen = THOR(model, update_interval=3), []
        for batch in stream(6):
            seen.append((stance(), bool(listened_to(model)), warnings.filters != before))
            step(compiled, optimizer, batch)
        assert seen == [("force_eager", True, True), ("default", False, False), ("default", False, False)] * 2
        gc.disable()
        try:
            assert stance() == "force_eager"  # the next step refreshes
            del optimizer
            assert stance() == "default"
        finally:
            gc.enable()
        assert warnings.filters == before
    assert not torch.nn.modules.module._has_any_global_hook()


def test_the_users_stance():
    """It holds inside a context that is entered while THOR waits, and what held before it afterwards."""
    model, [batch] = Model(), stream(1)
    for inside in (True, False):
        optimizer = THOR(model)
        with torch.compiler.set_stance("eager_on_recompile"):
            backward(model, batch)
            if inside:
                optimizer.step()
                assert stance() == "eager_on_recompile"
        if not inside:
            assert stance() == "force_eager"
            optimizer.step()
        assert stance() == "default"


def test_a_layer_that_is_used_late_is_refreshed_when_it_is():
    """It keeps nobody from running compiled while it waits, gets a plain gradient once, and its factors next."""
    model, counter, refreshes = Model(), CompileCounter(), []
    optimizer = THOR(model, update_interval=100, momentum=0.0)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for i, batch in enumerate(stream(6)):
        step(compiled, optimizer, batch, i >= 3)
        refreshes.append((optimizer.curvature["unused"].refreshes, counter.frame_count))
    assert refreshes == [(0, 0), (0, 1), (0, 1), (0, 2), (1, 2), (1, 2)]
    assert stance() == "default"


def test_statistics_that_never_come_are_an_error_with_the_cause():
    """A stance of the user's own, set after THOR armed its layers, lets compiled code run on a refresh step."""
    model, [batch] = Model(), stream(1)
    compiled = torch.compile(model, backend="eager")
    backward(compiled, batch)
    model.zero_grad()
    optimizer = THOR(model)
    with torch.compiler.set_stance("default"):
        backward(compiled, batch)
    with pytest.raises(RuntimeError, match=r"no statistics.*compiled"):
        optimizer.step()
