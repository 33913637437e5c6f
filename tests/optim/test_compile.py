"""`torch.compile` before or after THOR, of the model or a part: ordinary steps run compiled,
refreshes eagerly.
"""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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
    """Nothing compiled, and no optimizer of another test (one that failed keeps its locals) that
    waits.
    """
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
        (torch.randn(4, 5, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


def step(call, optimizer, batch):
    x, labels = batch
    functional.cross_entropy(call(x), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def thor(model):
    return THOR(model, update_interval=INTERVAL, trace_thresholds=(0.0, 0.0))


def compiled_after(model, **options):
    optimizer = thor(model)
    return torch.compile(model, **options), optimizer


def compiled_before(model, **options):
    return torch.compile(model, **options), thor(model)


def of_the_compiled(model, **options):
    compiled = torch.compile(model, **options)
    return compiled, thor(compiled)


def compiled_and_called_before(model, **options):
    compiled = torch.compile(model, **options)
    compiled(stream(1)[0][0]).sum().backward()
    model.zero_grad()
    return compiled, thor(model)


def in_place(model, **options):
    model.compile(**options)
    return model, thor(model)


def in_place_after(model, **options):
    optimizer = thor(model)
    model.compile(**options)
    return model, optimizer


def as_a_function(model, **options):
    return torch.compile(lambda x: model(x), **options), thor(model)


def a_part(model, **options):
    model.body.compile(**options)
    return model, thor(model)


WAYS = [
    compiled_after,
    compiled_before,
    of_the_compiled,
    compiled_and_called_before,
    in_place,
    in_place_after,
]
WAYS += [as_a_function, a_part]


@pytest.mark.parametrize("skips_guards", [True, False])
@pytest.mark.parametrize("how", WAYS)
def test_compiled_equals_eager_with_one_graph(how, skips_guards):
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=skips_guards):
        assert_compiled_equals_eager(how)


def assert_compiled_equals_eager(how):
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    counter = CompileCounter()
    # fullgraph: a graph break is an error
    call, optimizer = how(model, backend=counter, fullgraph=True)
    other, frames = thor(twin), []
    for batch in stream():
        step(call, optimizer, batch)
        step(twin, other, batch)
        frames.append(counter.frame_count)
    assert frames[1:] == [1] * (STEPS - 1), (
        "compiled once, for the first ordinary step, and never again"
    )
    for name, one in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), one, msg=name)
    refreshes = {
        c.refreshes for name, c in optimizer.curvature.items() if not name.endswith("unused")
    }
    assert refreshes == {3}


class Recomputed(Model):
    """Computes its body anew in the backward pass."""

    def forward(self, x):
        attended = x + self.attention(x, x, x, need_weights=False)[0]
        return checkpoint(self.body, attended, use_reentrant=False).mean(1)


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_function_whose_model_computes_parts_anew(whole):
    torch.manual_seed(0)
    model = Recomputed()
    twin = copy.deepcopy(model)
    optimizer, other = thor(model), thor(twin)

    def loss_of(x, labels):
        return functional.cross_entropy(model(x), labels)

    def all_of_it(x, labels):
        loss_of(x, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    call = torch.compile(all_of_it if whole else loss_of, backend="eager")
    for batch in stream():
        if whole:
            call(*batch)
        else:
            call(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        step(twin, other, batch)
    for name, one in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), one, msg=name)
    assert optimizer.curvature["body.3"].refreshes == 3


class Runs:
    """A backend that counts how often compiled code runs."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.count += 1
            return graph.forward(*args)

        return run


@pytest.mark.parametrize("how", WAYS)
def test_other_models_run_compiled_in_a_refresh(how):
    """All but those beside a model that is called by a compiled function, whose call cannot be seen
    first.
    """
    model, others, runs = Model(), [Body(nn.Linear(6, 2)) for _ in range(2)], Runs()
    call, optimizer = how(model, backend="eager")
    others[0].compile(backend=runs)
    teachers = others[0], torch.compile(others[1], backend=runs)
    ran = []
    for batch in stream(9):
        before = runs.count
        for teacher in teachers:
            teacher(batch[0])
        step(call, optimizer, batch)
        ran.append(runs.count - before)
    refreshed = [0, 0, 0] if how is as_a_function else [0, 0 if how is in_place_after else 2, 2]
    assert ran == [refreshed[0], 2, 2, 2, refreshed[1], 2, 2, 2, refreshed[2]]


def test_hooks_and_the_stance_outside_of_refreshes_are_those_of_the_user():
    model = Model()
    assert stance() == "default"
    optimizer = THOR(model, update_interval=3)
    seen = []
    for batch in stream(7):
        seen.append((stance(), bool(listened_to(model))))
        step(model, optimizer, batch)
    # until the model has been called once, it may be called by a compiled function
    assert (
        seen
        == [
            ("force_eager", True),
            *[("default", False)] * 2,
            *[("default", True), *[("default", False)] * 2] * 2,
        ][:7]
    )


def test_an_optimizer_that_is_dropped_wants_nothing():
    gc.disable()
    try:
        models = Model(), Model()
        models[0].compile()
        compiled = models[0]._compiled_call_impl
        optimizer, other = (THOR(model) for model in models)
        assert stance() == "force_eager"
        assert models[0]._compiled_call_impl is None
        del optimizer
        assert stance() == "force_eager"
        assert models[0]._compiled_call_impl is compiled
        del other
        assert stance() == "default"
    finally:
        gc.enable()


@pytest.mark.parametrize("leaves", ["before the step", "after the step"])
def test_a_stance_that_the_user_enters_holds_inside_its_context_and_is_over_after_it(leaves):
    model = Model()
    x, labels = stream(1)[0]
    with torch.compiler.set_stance("eager_on_recompile"):
        optimizer = THOR(model, update_interval=100)
        step(model, optimizer, (x, labels))
        assert stance() == "eager_on_recompile"
        optimizer = THOR(model, update_interval=100)  # waits when the context ends
    step(model, optimizer, (x, labels))
    assert stance() == "default"
    optimizer = THOR(model, update_interval=100)
    with torch.compiler.set_stance("eager_on_recompile"):
        functional.cross_entropy(model(x), labels).backward()
        if leaves == "after the step":
            optimizer.step()
        assert stance() == "eager_on_recompile"
    if leaves == "before the step":
        optimizer.step()
    assert stance() == "default"
    torch.compiler.set_stance("eager_on_recompile")
    try:
        optimizer = THOR(model, update_interval=2)
        for batch in stream(4):
            step(model, optimizer, batch)
            assert stance() == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")


def test_compiled_models_run_without_a_warning_while_thor_waits():
    """Torch warns of global hooks on each call of a compiled model; ours are no matter of its
    user.
    """
    model = Model()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        optimizer = THOR(model, update_interval=2)
        for batch in stream(4):
            step(compiled, optimizer, batch)
        assert warnings.filters != before  # the next step refreshes
        del optimizer
        gc.collect()
        assert warnings.filters == before
    assert not torch.nn.modules.module._has_any_global_hook()


def test_a_layer_that_is_used_late_is_refreshed_when_it_is():
    """It keeps nobody from running compiled while it waits, gets a plain gradient once, and its
    factors next.
    """

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
    for i, (x, _) in enumerate(stream(6)):
        compiled(x, i >= 3).square().mean().backward()
        assert not optimizer._curvature.capture.inside_transform, (
            "the compiler has traced a hook of ours"
        )
        optimizer.step()
        optimizer.zero_grad()
        refreshes.append(optimizer.curvature["late"].refreshes)
    assert refreshes == [0, 0, 0, 0, 1, 1]
    assert stance() == "default"


def test_statistics_that_never_come_are_an_error_with_the_cause():
    """A model that is compiled in place while a refresh is due runs without hooks, once."""
    model = Model()
    optimizer = THOR(model, update_interval=1)
    first, second, third = stream(3)
    step(model, optimizer, first)
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"no statistics.*compiled"):
        step(model, optimizer, second)
    optimizer.zero_grad()
    step(model, optimizer, third)
    assert optimizer.curvature["body.0"].refreshes == 2


def test_many_optimizers_that_wait_end_in_any_order():
    """Also those of one model, and one that never takes a step."""
    models = Model(), Model()
    optimizers = [THOR(model) for model in (models[0], models[1], models[0])]
    [batch] = stream(1)
    # the other one is not known yet
    for model, left in zip(models, ("force_eager", "default"), strict=True):
        model(batch[0])
        assert stance() == left
    step(models[1], optimizers[1], batch)
    step(models[0], optimizers.pop(0), batch)
    gc.collect()
    step(models[0], optimizers.pop(), batch)
    assert stance() == "default"
