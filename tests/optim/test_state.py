"""Stop anywhere, go on: the bits are those of a run that never stopped."""

import copy
import io
import pickle
import tempfile

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from comparing import having
from tiny import assert_same, batches, train, weights
from torch_thor import THOR, ThorMuon

STEPS = 8
STREAM = batches(STEPS, dtype=torch.float32)
EVERY = {"trace_thresholds": (0.0, 0.0)}
DCP_OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)


def build(dtype=torch.float32):
    """A model with preconditioned and plain parameters, the same every time."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    ).to(dtype)


def thor(make=build, optimizer=THOR, **options):
    """What makes a model and its optimizer, the same each time."""

    def setup():
        model = make()
        return model, optimizer(model, **options)

    return setup


def round_trip(objects):
    """Through a file that loads without unpickling code."""
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_state_dict(one, other):
    """Carry model and optimizer over to others."""
    for state, into in zip(round_trip([each.state_dict() for each in one]), other, strict=True):
        into.load_state_dict(state)


def by_distributed_checkpoint(folder, name):
    """The same with torch.distributed.checkpoint, into a model with other weights."""
    options = DCP_OPTIONS[name]

    def carry(one, other):
        kept = dict(zip(("model", "optimizer"), get_state_dict(*one, options=options), strict=True))
        place = tempfile.mkdtemp(dir=folder)
        dcp.save(kept, checkpoint_id=place, no_dist=True)
        with torch.no_grad():
            for parameter in other[0].parameters():
                parameter.add_(1.0)
        model, optimizer = get_state_dict(*other, options=options)
        loaded = {"model": model, "optimizer": optimizer}
        dcp.load(loaded, checkpoint_id=place, no_dist=True)
        set_state_dict(*other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options)
        for group in other[1].param_groups:
            if "trace_thresholds" in group:
                group["trace_thresholds"] = tuple(group["trace_thresholds"])  # DCP makes a list of it

    return carry


def assert_resumes(setup, stops, stream=STREAM, carry=by_state_dict):
    """The run is the same if it is stopped before one of the steps `stops`. Returns its optimizer."""
    model, optimizer = setup()
    resumed = []
    for step, batch in enumerate(stream):
        if step in stops:
            resumed.append((step, setup()))
            carry((model, optimizer), resumed[-1][1])
        train(model, optimizer, [batch])
    for step, (twin, other) in resumed:
        train(twin, other, stream[step:])
        assert_same(weights(twin), weights(model), f"stopped before step {step}: weights")
        assert_same(other.state_dict(), optimizer.state_dict(), f"stopped before step {step}: state")
    return optimizer


def convolutional():
    """Grouped factors have one more dimension; both sides have a smaller last block with split_dim=4."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 1), nn.Unflatten(2, (5, 1)), nn.Conv2d(4, 6, (3, 1), groups=2)),
        *(nn.Flatten(), nn.Linear(18, 3)),
    )


class Reshaping(nn.Module):
    """The first layer has fewer rows than the second."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(2, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).reshape(-1, 2)).reshape(-1, 3)


def first_layer_stops():
    """After the first refresh, layers with another number of rows than loss terms refresh alone."""
    torch.manual_seed(1)
    model = Reshaping()
    groups = [
        {"params": list(model.first.parameters()), "trace_thresholds": (1e9, 1e8)},
        {"params": list(model.second.parameters()), **EVERY},
    ]
    return model, having(THOR(groups, model=model, update_interval=1), loss_terms=8)


def groups():
    """With options of their own, of which one has changed since."""
    model = build()
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "damping": 0.1, "split_dim": None}
    vectors = {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.01, "momentum": 0.5}
    return model, THOR([matrices, vectors], model=model, update_interval=3)


SETTINGS = {
    "defaults": thor(update_interval=3),
    "nesterov_decay_clip": thor(update_interval=3, nesterov=True, weight_decay=0.1, kl_clip=1e-3, split_dim=4),
    "average_keep_stop": thor(update_interval=2, factor_decay=0.5, trace_thresholds=(0.08, 0.02)),
    "callable": thor(update_interval=lambda step: 3 if step == 0 else 1, **EVERY),
    "no_momentum": thor(update_interval=3, momentum=0.0),
    "split": thor(update_interval=3, split_dim=4, **EVERY),
    "groups": groups,
    "last_blocks": thor(convolutional, update_interval=2, split_dim=4, factor_decay=0.5, **EVERY),
    "first_layer_stops": first_layer_stops,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_never_having_stopped(name):
    optimizer = assert_resumes(SETTINGS[name], range(6))
    if name == "first_layer_stops":
        assert optimizer.curvature["first"].stopped
        assert optimizer.curvature["second"].rows_per_term == 3


@pytest.mark.parametrize("how", DCP_OPTIONS)
def test_distributed_checkpoint(how, tmp_path):
    """Both sides may be fresh: DCP then makes them take a step of zero gradients, which must not count.

    It also wants some state of every parameter as soon as one has any, with momentum or without.
    """
    for name in ("defaults", "no_momentum", "split", "callable", "groups"):
        assert_resumes(SETTINGS[name], (0, 4), carry=by_distributed_checkpoint(tmp_path, how))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_resume_in_other_dtypes(dtype, tmp_path):
    """The base class casts state to the parameter's dtype; factors and momentum must survive that."""
    stream = [(x.to(dtype), labels) for x, labels in STREAM]
    for carry in (by_state_dict, by_distributed_checkpoint(tmp_path, "plain")):
        optimizer = assert_resumes(thor(lambda: build(dtype), update_interval=3), (1, 3, 4), stream, carry)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        assert all(tensor.dtype == wide for tensor in tensors)


def wide(memory_format):
    """Large enough for products that are rounded by the strides of their factors."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 70, 3), nn.Tanh(), nn.Flatten(), nn.Linear(630, 65), nn.Tanh(), nn.Linear(65, 3)
    ).to(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
def test_strides_of_what_is_loaded(optimizer, memory_format, tmp_path):
    """Some formats give every tensor back row-major, whatever it was: the run that goes on must have had them so."""

    def transposed(one, other):
        saved = copy.deepcopy(one[1].state_dict())
        for state in saved["state"].values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.mT.contiguous().mT if value.dim() == 3 else value.contiguous()
        other[0].load_state_dict(one[0].state_dict())
        other[1].load_state_dict(saved)

    setup = thor(lambda: wide(memory_format), optimizer, update_interval=3)

    def checked(carry):
        def carry_and_check(one, other):
            carry(one, other)
            for left, right in zip(one[1].state.values(), other[1].state.values(), strict=True):
                for key, value in left.items():
                    assert not isinstance(value, torch.Tensor) or value.stride() == right[key].stride(), key

        return carry_and_check

    stream = [(torch.randn(16, 3, 5, 5), torch.randint(3, (16,))) for _ in range(4)]
    for carry in (by_distributed_checkpoint(tmp_path, "plain"), transposed):
        assert_resumes(setup, (1, 2), stream, checked(carry))


class Late(nn.Module):
    """A head that the loss reaches in the steps that say so: the number of a step comes with the batch."""

    def __init__(self, reached):
        super().__init__()
        self.reached = reached
        self.body, self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x[:, :5]))
        step = int(x[0, 5])
        return self.first(h) + (self.second(h) if step in self.reached else 0.0)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("reached", [(2, 3, 5), (0, 1, 5, 6)], ids=["late", "left-out-later"])
def test_resume_with_a_layer_that_a_refresh_has_not_reached(reached, set_to_none):
    """It refreshes in the step after the first that reaches it: a run stopped between must not do it before."""

    def steps(model, optimizer, stream):
        found = []
        for x, labels in stream:
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            found.append([(event.layer, event.step) for event in optimizer.last_refresh])
        return found

    numbered = [(torch.cat([x, torch.full((len(x), 1), float(i))], 1), y) for i, (x, y) in enumerate(STREAM)]
    torch.manual_seed(1)
    start = Late(reached)
    setup = thor(lambda: copy.deepcopy(start), update_interval=4, **EVERY)
    model, optimizer = setup()
    wanted = steps(model, optimizer, numbered)
    for stop in range(1, 6):
        (first, its_own), (second, resumed) = setup(), setup()
        steps(first, its_own, numbered[:stop])
        by_state_dict((first, its_own), (second, resumed))
        for p, q in zip(second.parameters(), first.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()  # zeros, which momentum goes on with, are not saved
        assert steps(second, resumed, numbered[stop:]) == wanted[stop:]
        assert_same(weights(second), weights(model))
        assert_same(resumed.state_dict(), optimizer.state_dict())


def test_resume_with_schedulers():
    """`initial_lr` and the like go through the groups."""

    def setup():
        model, optimizer = SETTINGS["defaults"]()
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)

    def steps(model, optimizer, scheduler, stream):
        for batch in stream:
            train(model, optimizer, [batch])
            scheduler.step()

    whole, first, second = setup(), setup(), setup()
    steps(*whole, STREAM)
    steps(*first, STREAM[:4])
    by_state_dict(first, second)
    steps(*second, STREAM[4:])
    assert_same(weights(second[0]), weights(whole[0]))


# ---------------------------------------------------------------------------------- what is in the state


def test_saved_state_is_a_snapshot():
    """Going on after `state_dict` does not change what a loader copied from it."""
    (model, optimizer), (other, loaded) = SETTINGS["defaults"](), SETTINGS["defaults"]()
    train(model, optimizer, STREAM[:1])
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(loaded.state_dict())
    train(model, optimizer, STREAM[1:])
    assert_same(loaded.state_dict(), before)


def keys_of(optimizer):
    return {index: sorted(state) for index, state in optimizer.state_dict()["state"].items()}


def test_state_holds_tensors_and_numbers_by_parameter():
    """With the same keys at any time: checkpoints of ranks that have seen different data must have one structure."""
    model, optimizer = SETTINGS["average_keep_stop"]()
    train(model, optimizer, STREAM[:1])
    keys = keys_of(optimizer)
    for batch in STREAM[1:]:
        train(model, optimizer, [batch])
        assert keys_of(optimizer) == keys
    assert set(optimizer.state) <= set(model.parameters())
    for state in optimizer.state.values():
        for key, value in state.items():
            assert isinstance(key, str)
            assert isinstance(value, torch.Tensor | int | float), key


def test_split_factors_are_stored_as_blocks_only():
    """Two factors and two inverses of 64 × 64 with blocks of 8: 4 · 8 · 64 numbers, and the momentum."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = THOR(model, split_dim=8)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    stored = sum(v.numel() for v in optimizer.state[model[0].weight].values() if isinstance(v, torch.Tensor))
    assert stored <= 4 * 8 * 64 + 64 * 64
    size = io.BytesIO()
    torch.save(optimizer.state_dict(), size)
    assert size.tell() < 4 * (4 * 8 * 64 + 64 * 64) + 8000  # no view of something larger goes into the file


def test_the_state_of_another_model_is_refused():
    """The layer is named: it is the first thing to look at. Only the last block may differ, or their number."""
    model, optimizer = SETTINGS["defaults"]()
    train(model, optimizer, STREAM[:1])
    other = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"\w"):
        THOR(other).load_state_dict(optimizer.state_dict())
    for features, split_dim in ((4, 128), (6, 128), (6, 4), (9, 4)):
        saved, other = nn.Sequential(nn.Linear(5, 7)), nn.Sequential(nn.Linear(features, 7))
        optimizer = THOR(saved, split_dim=split_dim)
        saved(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="'0'"):
            THOR(other, split_dim=split_dim).load_state_dict(optimizer.state_dict())


def test_load_into_a_running_optimizer_drops_what_was_gathered():
    """Rolling back after a bad epoch: rows gathered before the load belong to nobody."""
    (model, optimizer), (twin, other) = (thor(update_interval=1)() for _ in range(2))
    train(model, optimizer, STREAM[:2])
    train(twin, other, STREAM[:2])
    saved = round_trip([model.state_dict(), optimizer.state_dict()])
    model(100 * STREAM[2][0]).square().mean().backward()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for parameter in model.parameters():
        parameter.grad = None
    train(model, optimizer, STREAM[3:6])
    train(twin, other, STREAM[3:6])
    assert_same(weights(model), weights(twin))


@pytest.mark.filterwarnings("error")
def test_asking_a_fresh_optimizer_for_its_state_is_no_step():
    """DCP takes a step of zeros to do so; Accelerate loads it back at once."""
    for options in ({}, {"momentum": 0.0}, {"lr": torch.tensor(0.05)}):
        (model, optimizer), (twin, other) = (thor(update_interval=3, **copy.deepcopy(options))() for _ in range(2))
        before = weights(model)
        if not options:
            optimizer.load_state_dict(optimizer.state_dict())
        state = get_optimizer_state_dict(model, optimizer)
        assert set(state["state"]) >= {"0.weight", "3.weight", "5.weight"}
        assert_same(weights(model), before)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
        assert all(curvature.refreshes == 0 for curvature in optimizer.curvature.values())
        train(model, optimizer, STREAM)
        train(twin, other, STREAM)
        assert_same(weights(model), weights(twin))


def test_distributed_checkpoint_in_memory():
    """An option that was scheduled meanwhile comes along."""
    (first, optimizer), (second, resumed) = groups(), groups()
    optimizer.param_groups[0]["damping"] = 0.07
    train(first, optimizer, STREAM[:4])
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, resumed, copy.deepcopy(get_optimizer_state_dict(first, optimizer)))
    assert [group["damping"] for group in resumed.param_groups] == [0.07, 0.03]
    train(first, optimizer, STREAM[4:])
    train(second, resumed, STREAM[4:])
    assert_same(weights(second), weights(first))


# ------------------------------------------------------------------------------------ copies


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


@pytest.mark.parametrize("how", COPIES)
def test_an_optimizer_is_not_copied(how):
    """Its layers are those of the model; the message says what to do instead."""
    model, optimizer = SETTINGS["defaults"]()
    train(model, optimizer, STREAM[:1])
    for value in (optimizer, (model, optimizer), (optimizer, model)):
        with pytest.raises(TypeError, match=r"THOR cannot be copied or pickled.*state_dict\(\)"):
            COPIES[how](value)


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_the_model_alone_is_just_a_model(how):
    """An exponential moving average of the weights, a frozen teacher: their passes are not statistics."""
    (model, optimizer), (plain, other) = (thor(update_interval=1)() for _ in range(2))
    for x, labels in STREAM[:4]:
        twin = COPIES[how](model)
        twin(100 * x).square().mean().backward()
        train(model, optimizer, [(x, labels)])
        twin(100 * x).square().mean().backward()
        train(plain, other, [(x, labels)])
    assert_same(weights(model), weights(plain))
    again = THOR(twin)  # and it can be given an optimizer of its own
    train(twin, again, STREAM[4:6])
    assert again.curvature["0"].refreshes == 1


def test_whole_model_saved_with_its_hooks():
    """`torch.save(model)` still works and does not drag the optimizer along."""
    model, optimizer = SETTINGS["defaults"]()
    train(model, optimizer, STREAM[:1])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_same(weights(torch.load(file, weights_only=False)), weights(model))
    assert b"curvature" not in pickle.dumps(model) or len(pickle.dumps(model)) < 20_000
