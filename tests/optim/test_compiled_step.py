"""`torch.compile` of a step, or of a function with the whole training step: the weights of eager,
two graph breaks, and nothing compiled again.
"""

import gc

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tiny import leave_no_listeners
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon

# Torch 2.9 compiles a function anew when an option of an optimizer that it calls has changed, such
# as lr; what it computes is the same.
GUARDS_OPTIONS = torch.__version__ < "2.14"
never_compiles_again = pytest.mark.skipif(GUARDS_OPTIONS, reason="compiled anew by torch 2.9")

STEPS = 10
OPTIONS = {
    THOR: {"update_interval": 3, "trace_thresholds": (0.0, 0.0)},
    ThorMuon: {"update_interval": 3},
    LAMB: {"lr": 0.05},
    AGCSGD: {"lr": 0.05, "momentum": 0.9},
}
CURVATURE = [THOR, ThorMuon]
SLOW = pytest.mark.slow
# of each base class one is a fast test
ONE_OF_EACH = [
    pytest.param(kind, marks=[] if kind in (ThorMuon, AGCSGD) else SLOW) for kind in OPTIONS
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled, and no optimizer of another test that waits."""
    torch._dynamo.reset()
    gc.collect()
    leave_no_listeners()
    counters.clear()
    yield
    torch._dynamo.reset()


def make(kind, taught=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if taught:  # a large singular value, as training leaves it
        nn.init.constant_(model[0].weight, 0.5)
    return model, kind(model, **{**OPTIONS[kind], **options})


def stream(count=STEPS, rows=lambda i: 16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows(i), 4, generator=generator) for i in range(count)]


def loss_of(model, x):
    return model(x).square().mean()


def breaks():
    return sum(counters["graph_break"].values())


def compiled():
    """The number of functions that the compiler has been asked to compile so far."""
    return counters["frames"]["total"]


def eager(function):
    return function


def with_compiler(function):
    return torch.compile(function, backend="eager")


# ---- training steps: each gets a model, its optimizer and what compiles --------------------------


def whole(model, optimizer, comp):
    def train(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    return comp(train)


def zeroed_last(model, optimizer, comp):
    def train(x):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return comp(train)


def of_the_step(model, optimizer, comp):
    optimizer.step = comp(optimizer.step)
    return whole(model, optimizer, eager)


def beside_the_step(model, optimizer, comp):
    step = comp(optimizer.step)

    def train(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        step()

    return train


def of_a_function_that_steps(model, optimizer, comp):
    step = comp(lambda: optimizer.step())

    def train(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        step()

    return train


def with_a_closure(model, optimizer, comp):
    def train(x):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return comp(train)


def of_the_model_too(model, optimizer, comp):
    return whole(comp(model), optimizer, comp)


def nested(model, optimizer, comp):
    loss = comp(lambda x: loss_of(model, x))

    def train(x):
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()

    return comp(train)


def scheduled_inside(model, optimizer, comp):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def train(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        scheduler.step()

    return comp(train)


def scheduled_outside(model, optimizer, comp):
    scheduler, call = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), None

    def train(x):
        call(x)
        scheduler.step()

    call = whole(model, optimizer, comp)
    return train


def scaled(model, optimizer, comp):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def train(x):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return comp(train)


def zeros_kept(model, optimizer, comp):
    def train(x):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x).backward()
        optimizer.step()

    return comp(train)


def two_optimizers(model, optimizer, comp):
    _, other = second = make(type(optimizer))

    def train(x):
        optimizer.zero_grad()
        other.zero_grad()
        (loss_of(model, x) + loss_of(second[0], model(x).tanh() @ torch.ones(2, 4))).backward()
        optimizer.step()
        other.step()

    return comp(train)


def two_steps(model, optimizer, comp):
    def train(x):
        for part in x[:8], x[8:]:
            optimizer.zero_grad()
            loss_of(model, part).backward()
            optimizer.step()

    return comp(train)


def two_steps_in_a_row(model, optimizer, comp):
    def train(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, x * 2).backward()
        optimizer.step()

    return comp(train)


def evaluated_before(model, optimizer, comp):
    train = whole(model, optimizer, comp)

    def evaluate_and_train(x):
        with torch.no_grad():
            model(x)
        train(x)

    return evaluate_and_train


WAYS = [
    whole,
    zeroed_last,
    of_the_step,
    beside_the_step,
    of_a_function_that_steps,
    with_a_closure,
    of_the_model_too,
    nested,
    scheduled_inside,
    scheduled_outside,
    scaled,
    zeros_kept,
    two_optimizers,
    two_steps,
    two_steps_in_a_row,
    evaluated_before,
]


def trained(kind, way, comp, batches, **options):
    """The weights after the training, and what had been compiled after each step."""
    model, optimizer = make(kind, **options)
    train, counts = way(model, optimizer, comp), []
    for x in batches:
        train(x)
        counts.append(compiled())
    if kind in CURVATURE:
        assert optimizer.curvature["0"].refreshes >= 2
    return [p.detach().clone() for p in model.parameters()], counts


def assert_as_eager(kind, way, comp, batches, **options):
    want, _ = trained(kind, way, eager, batches, **options)
    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    got, counts = trained(kind, way, comp, batches, **options)
    for one, other in zip(want, got, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    return counts


# the ways that differ most, with curvature, are fast tests
FAST = (whole, with_a_closure, of_the_model_too, scaled, two_optimizers, evaluated_before)


# one of each base class
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=[] if kind is THOR and way in FAST else SLOW)
        for kind in (THOR, LAMB)
        for way in WAYS
    ],
)
def test_compiled_steps_train_as_eager_ones(kind, way):
    counts = assert_as_eager(kind, way, with_compiler, stream())
    # steps 0, 3, 6 and 9 refresh, and two steps a call refresh in the second step of some calls
    late = 3 if way is two_steps_in_a_row else 2
    again = counts[late - 1 :] != counts[late - 1 : late] * (STEPS - late + 1)
    assert GUARDS_OPTIONS or not again, "compiled again"


def test_a_network_that_is_trained_already():
    counts = assert_as_eager(ThorMuon, scheduled_outside, with_compiler, stream(), taught=True)
    assert GUARDS_OPTIONS or counts[1:] == counts[1:2] * (STEPS - 1)
    _, optimizer = make(ThorMuon, taught=True)
    scheduled_outside(optimizer.model, optimizer, eager)(stream(1)[0])
    assert {state["lr_factor"] for state in optimizer.state.values()} == {0.0125, 0.125, 1.0}


@never_compiles_again
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_whole_step_has_two_graph_breaks_and_never_compiles_again(kind):
    """Those of backward() and step(), around a graph that the next refresh leaves as it is."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_as_eager(kind, scheduled_outside, with_compiler, stream())
    assert breaks() == 2
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "way", [of_the_step, pytest.param(beside_the_step, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_compiled_step_has_no_graph(kind, way):
    assert_as_eager(kind, way, with_compiler, stream(4))
    assert breaks() == counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_with_graphs_of_autograd(kind):
    assert_as_eager(kind, whole, lambda f: torch.compile(f, backend="aot_eager"), stream())
    assert breaks() == 2


@never_compiles_again
@pytest.mark.parametrize("kind", CURVATURE)
def test_an_interval_that_grows_compiles_nothing_again(kind):
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_as_eager(
            kind, whole, with_compiler, stream(), update_interval=lambda step: 1 + step // 2
        )
    assert counters["stats"]["unique_graphs"] == 1


@never_compiles_again
@pytest.mark.parametrize("kind", [THOR, pytest.param(LAMB, marks=SLOW)])
def test_batches_of_several_sizes_share_a_graph(kind):
    counts = assert_as_eager(kind, whole, with_compiler, stream(rows=lambda i: 16 - i % 5))
    assert counts[2:] == counts[2:3] * (STEPS - 2)
    assert counters["stats"]["unique_graphs"] == 2, "one for the first size, one for all"


@pytest.mark.parametrize("kind", [THOR, pytest.param(LAMB, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", [whole, of_the_step, beside_the_step, of_a_function_that_steps, two_steps_in_a_row]
)
def test_fullgraph_is_refused_in_one_line(kind, way):
    def comp(function):
        return torch.compile(function, backend="eager", fullgraph=True)

    model, optimizer = make(kind)
    before = [p.detach().clone() for p in model.parameters()]
    train = way(model, optimizer, comp)
    with pytest.raises(RuntimeError) as caught:
        train(stream(1)[0])
    assert str(caught.value).splitlines()[0] == (
        f"torch.compile(fullgraph=True) of a function that calls {kind.__name__}.step() or its "
        "zero_grad(): a step decides by values of tensors, which no graph does; leave fullgraph "
        "out, and the step runs eagerly between the graphs"
    )
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("kind", OPTIONS)
def test_fullgraph_is_refused_after_a_refresh_too(kind):
    model, optimizer = make(kind)
    step = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    for x in stream(2):
        whole(model, optimizer, eager)(x)
    with pytest.raises(RuntimeError, match=rf"^torch\.compile\(fullgraph=True\).*{kind.__name__}"):
        step()


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_fullgraph_is_no_matter_where_the_user_has_switched_the_compiler_off(kind):
    with torch.compiler.set_stance("force_eager"):
        assert_as_eager(
            kind, whole, lambda f: torch.compile(f, backend="eager", fullgraph=True), stream(4)
        )
    assert compiled() == 0


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_options_and_state_gain_nothing_from_the_compiler(kind):
    model, optimizer = make(kind)
    other, twin = make(kind)
    train, plain = whole(model, optimizer, with_compiler), whole(other, twin, eager)
    for x in stream(4):
        train(x)
        plain(x)
    assert [set(group) for group in optimizer.param_groups] == [
        set(group) for group in twin.param_groups
    ]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert set(optimizer.state[p]) == set(twin.state[q])


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_hooks_of_the_user_run_in_a_compiled_function(kind):
    model, optimizer = make(kind)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train = whole(model, optimizer, with_compiler)
    for x in stream(4):
        train(x)
    assert called == ["before", "after"] * 4


@pytest.mark.parametrize("kind", CURVATURE)
def test_a_compiled_zero_grad_drops_the_statistics(kind):
    """Of a backward pass whose gradients are not wanted, on a step that refreshes."""

    def trained_with(comp):
        model, optimizer = make(kind)
        zero_grad = comp(lambda: optimizer.zero_grad())
        for x in stream(4):
            loss_of(model, x * 3).backward()
            zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            zero_grad()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained_with(eager), trained_with(with_compiler)))
