"""Stop anywhere, go on: the bits are those of a run that never stopped."""

import copy
import io
import pickle

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

from tiny import assert_same, batches, train, weights
from torch_thor import THOR

STEPS = 8
STREAM = batches(STEPS, dtype=torch.float32)


def three_steps_or_one(step):
    return 3 if step == 0 else 1


SETTINGS = {
    "defaults": {"update_interval": 3},
    "nesterov_decay_clip": {
        "update_interval": 3, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3, "split_dim": 4,
    },
    "average_keep_stop": {
        "update_interval": 2, "factor_decay": 0.5, "trace_thresholds": (0.08, 0.02),
    },
    "callable": {"update_interval": three_steps_or_one, "trace_thresholds": (0.0, 0.0)},
    "no_momentum": {"update_interval": 3, "momentum": 0.0},
}  # fmt: skip


def build(dtype=torch.float32):
    """A model with preconditioned and plain parameters, the same every time."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    ).to(dtype)


def convolutional():
    """Grouped factors have one more dimension; both sides have a smaller last block with split_dim=4."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 1), nn.Unflatten(2, (5, 1))).append(
        nn.Conv2d(4, 6, (3, 1), groups=2)
    ).append(nn.Flatten()).append(nn.Linear(18, 3))  # fmt: skip


def round_trip(objects):
    """Through a file that loads without unpickling code."""
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_dtype(stream, dtype):
    return [(x.to(dtype), labels) for x, labels in stream]


# With intervals of two and three: before any step, after a refresh, before one, and after some layers have stopped.
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_never_having_stopped(name, stop):
    whole = build()
    whole_optimizer = THOR(whole, **SETTINGS[name])
    train(whole, whole_optimizer, STREAM)

    first = build()
    optimizer = THOR(first, **SETTINGS[name])
    train(first, optimizer, STREAM[:stop])
    saved = round_trip({"model": first.state_dict(), "optimizer": optimizer.state_dict()})

    second = build()
    resumed = THOR(second, **SETTINGS[name])
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, STREAM[stop:])
    assert_same(weights(second), weights(whole))
    assert_same(resumed.state_dict(), whole_optimizer.state_dict())


@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_resume_in_other_dtypes(dtype, stop):
    """The base class casts state to the parameter's dtype; factors and momentum must survive that."""
    stream = in_dtype(STREAM, dtype)
    whole, first, second = build(dtype), build(dtype), build(dtype)
    options = {"update_interval": 3}
    optimizers = [THOR(model, **options) for model in (whole, first, second)]
    train(whole, optimizers[0], stream)
    train(first, optimizers[1], stream[:stop])
    saved = round_trip({"model": first.state_dict(), "optimizer": optimizers[1].state_dict()})
    second.load_state_dict(saved["model"])
    optimizers[2].load_state_dict(saved["optimizer"])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for state in optimizers[2].state.values():
        for key, value in state.items():
            assert not isinstance(value, torch.Tensor) or value.dtype == wide, key
    train(second, optimizers[2], stream[stop:])
    assert_same(weights(second), weights(whole))


class Reshaping(nn.Module):
    """The first layer, which tells how many loss terms there are, has fewer rows than the second."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(2, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).reshape(-1, 2)).reshape(-1, 3)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resume_after_the_first_layer_has_stopped(stop):
    """The loss terms are still counted where they were."""

    def setup():
        torch.manual_seed(1)
        model = Reshaping()
        groups = [
            {"params": list(model.first.parameters()), "trace_thresholds": (1e9, 1e8)},
            {"params": list(model.second.parameters()), "trace_thresholds": (0.0, 0.0)},
        ]
        return model, THOR(groups, model=model, update_interval=1)

    (whole, whole_optimizer), (first, optimizer), (second, resumed) = setup(), setup(), setup()
    train(whole, whole_optimizer, STREAM)
    train(first, optimizer, STREAM[:stop])
    saved = round_trip([first.state_dict(), optimizer.state_dict()])
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(second, resumed, STREAM[stop:])
    assert whole_optimizer.curvature["first"].stopped
    assert resumed.curvature["second"].rows_per_term == 3
    assert_same(weights(second), weights(whole))


@pytest.mark.parametrize("stop", [1, 2])
def test_resume_with_grouped_convolutions_and_last_blocks(stop):
    options = {"update_interval": 2, "split_dim": 4, "factor_decay": 0.5, "trace_thresholds": (0.0, 0.0)}
    whole, first, second = convolutional(), convolutional(), convolutional()
    optimizers = [THOR(model, **options) for model in (whole, first, second)]
    assert "3" in optimizers[0].curvature
    train(whole, optimizers[0], STREAM)
    train(first, optimizers[1], STREAM[:stop])
    saved = round_trip({"model": first.state_dict(), "optimizer": optimizers[1].state_dict()})
    second.load_state_dict(saved["model"])
    optimizers[2].load_state_dict(saved["optimizer"])
    train(second, optimizers[2], STREAM[stop:])
    assert_same(weights(second), weights(whole))
    assert_same(optimizers[2].state_dict(), optimizers[0].state_dict())


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


NUMBERED = [(torch.cat([x, torch.full((len(x), 1), float(i))], 1), y) for i, (x, y) in enumerate(STREAM)]


@pytest.mark.parametrize(
    ("how", "set_to_none"), [("state_dict", True), ("state_dict", False), ("pickle", True), ("deepcopy", True)]
)
@pytest.mark.parametrize("stop", range(1, 6))
@pytest.mark.parametrize("reached", [(2, 3, 5), (0, 1, 5, 6)], ids=["late", "left-out-later"])
def test_resume_with_a_layer_that_a_refresh_has_not_reached(reached, stop, how, set_to_none):
    """It refreshes in the step after the first that reaches it: a run stopped between must not do it before."""

    def setup():
        torch.manual_seed(1)
        model = Late(reached)
        return model, THOR(model, update_interval=4, trace_thresholds=(0.0, 0.0))

    def steps(model, optimizer, stream):
        found = []
        for x, labels in stream:
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            found.append([(event.layer, event.step) for event in optimizer.last_refresh])
        return found

    whole, whole_optimizer = setup()
    wanted = steps(whole, whole_optimizer, NUMBERED)
    model, optimizer = setup()
    steps(model, optimizer, NUMBERED[:stop])
    if how == "deepcopy":
        twin, resumed = copy.deepcopy((model, optimizer))
    elif how == "pickle":
        twin, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        saved = round_trip([model.state_dict(), optimizer.state_dict()])
        twin, resumed = setup()
        twin.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()  # zeros, which momentum goes on with, are in no checkpoint
    assert steps(twin, resumed, NUMBERED[stop:]) == wanted[stop:]
    assert_same(weights(twin), weights(whole))
    assert_same(resumed.state_dict(), whole_optimizer.state_dict())


def test_a_checkpoint_of_a_version_that_did_not_keep_who_is_idle():
    model, twin = build(), build()
    optimizer, resumed = (THOR(one, update_interval=3) for one in (model, twin))
    train(model, optimizer, STREAM[:2])
    twin.load_state_dict(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("idle", None)
    resumed.load_state_dict(saved)
    train(model, optimizer, STREAM[2:])
    train(twin, resumed, STREAM[2:])
    assert_same(weights(twin), weights(model))
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_resume_with_schedulers():
    """`initial_lr` and the like go through the groups."""

    def setup():
        model = build()
        optimizer = THOR(model, update_interval=3)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)

    def steps(model, optimizer, scheduler, stream):
        for batch in stream:
            train(model, optimizer, [batch])
            scheduler.step()

    whole, first, second = setup(), setup(), setup()
    steps(*whole, STREAM)
    steps(*first, STREAM[:4])
    saved = round_trip([one.state_dict() for one in first])
    for one, state in zip(second, saved, strict=True):
        one.load_state_dict(state)
    steps(*second, STREAM[4:])
    assert_same(weights(second[0]), weights(whole[0]))


def test_saved_state_is_a_snapshot():
    """Going on after `state_dict` does not change what a loader copied from it."""
    model, other = build(), build()
    optimizer, loaded = THOR(model, update_interval=2), THOR(other, update_interval=2)
    train(model, optimizer, STREAM[:1])
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(loaded.state_dict())
    train(model, optimizer, STREAM[1:])
    after = loaded.state_dict()
    for index, state in before["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, after["state"][index][key]), key


def test_state_holds_tensors_and_numbers_by_parameter():
    model = build()
    optimizer = THOR(model, update_interval=2)
    train(model, optimizer, STREAM[:3])
    ours = set(model.parameters())
    for parameter, state in optimizer.state.items():
        assert parameter in ours
        for key, value in state.items():
            assert isinstance(key, str)
            assert isinstance(value, torch.Tensor | int | float), key


def test_state_has_the_same_keys_before_and_after_any_step():
    """Checkpoints of ranks that have seen different data must have one structure."""
    model = build()
    optimizer = THOR(model, update_interval=2, trace_thresholds=(0.1, 0.05))
    train(model, optimizer, STREAM[:1])
    keys = {index: sorted(state) for index, state in optimizer.state_dict()["state"].items()}
    for batch in STREAM[1:]:
        train(model, optimizer, [batch])
        assert {i: sorted(s) for i, s in optimizer.state_dict()["state"].items()} == keys


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


def test_loading_another_models_state_is_refused():
    model, other = build(), nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = THOR(model)
    train(model, optimizer, STREAM[:1])
    with pytest.raises(ValueError, match=r"\w"):
        THOR(other).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(("features", "split_dim"), [(4, 128), (6, 128), (6, 4), (9, 4)])
def test_loading_other_factor_shapes_is_refused(features, split_dim):
    """The layer is named: it is the first thing to look at. Only the last block may differ, or their number."""
    saved, other = nn.Sequential(nn.Linear(5, 7)), nn.Sequential(nn.Linear(features, 7))
    optimizer = THOR(saved, split_dim=split_dim)
    saved(torch.randn(3, 5)).square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="'0'"):
        THOR(other, split_dim=split_dim).load_state_dict(optimizer.state_dict())


def test_load_into_a_running_optimizer_drops_what_was_gathered():
    """Rolling back after a bad epoch: rows gathered before the load belong to nobody."""
    model, twin = build(), build()
    optimizer, other = THOR(model, update_interval=1), THOR(twin, update_interval=1)
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
    for name in ("0.weight", "3.weight", "5.weight"):
        assert torch.equal(model.get_parameter(name), twin.get_parameter(name)), name


# ------------------------------------------------------------------------------------ copies


def assert_independent_and_equal(model, optimizer, twin, twin_optimizer):
    """Both go on by themselves to the same weights, and neither moves the other."""
    still = weights(twin)
    train(model, optimizer, STREAM[4:])
    assert_same(weights(twin), still)
    train(twin, twin_optimizer, STREAM[4:])
    assert_same(weights(twin), weights(model))
    assert_same(optimizer.state_dict(), twin_optimizer.state_dict())
    assert all(p in set(twin.parameters()) for group in twin_optimizer.param_groups for p in group["params"])
    assert not set(twin.parameters()) & set(model.parameters())


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_of_both_goes_on(how, steps):
    model = build()
    optimizer = THOR(model, update_interval=3, split_dim=4, nesterov=True)
    train(model, optimizer, STREAM[:steps])
    if how == "deepcopy":
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
    else:
        twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    assert isinstance(twin_optimizer, THOR)
    assert_independent_and_equal(model, optimizer, twin, twin_optimizer)


def test_copy_of_the_optimizer_first():
    """The order inside the tuple must not matter."""
    model = build()
    optimizer = THOR(model, update_interval=3)
    train(model, optimizer, STREAM[:2])
    twin_optimizer, twin = copy.deepcopy((optimizer, model))
    assert_independent_and_equal(model, optimizer, twin, twin_optimizer)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_of_the_model_alone_is_just_a_model(how):
    """An exponential moving average of the weights, a frozen teacher: their passes are not statistics."""
    model, plain = build(), build()
    optimizer, other = THOR(model, update_interval=1), THOR(plain, update_interval=1)
    for x, labels in STREAM[:4]:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
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
    model = build()
    optimizer = THOR(model)
    train(model, optimizer, STREAM[:1])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert_same(weights(twin), weights(model))
    assert b"curvature" not in pickle.dumps(model) or len(pickle.dumps(model)) < 20_000


# -------------------------------------------------------------- torch.distributed.checkpoint


DCP_OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process")
@pytest.mark.parametrize(("momentum", "stop"), [(0.9, 0), (0.9, 1), (0.9, 3), (0.9, 4), (0.0, 0), (0.0, 4)])
@pytest.mark.parametrize("options", DCP_OPTIONS.values(), ids=DCP_OPTIONS)
def test_distributed_checkpoint_round_trip(options, momentum, stop, tmp_path):
    """Both sides may be fresh: DCP then makes them take a step of zero gradients, which must not count.

    It also wants some state of every parameter as soon as one has any, with momentum or without.
    """
    settings = {"update_interval": 3, "trace_thresholds": (0.0, 0.0), "split_dim": 4, "momentum": momentum}
    whole, first, second = build(), build(), build()
    optimizers = [THOR(model, **settings) for model in (whole, first, second)]
    train(whole, optimizers[0], STREAM)
    train(first, optimizers[1], STREAM[:stop])
    model_state, optimizer_state = get_state_dict(first, optimizers[1], options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)

    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)
    model_state, optimizer_state = get_state_dict(second, optimizers[2], options=options)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        second,
        optimizers[2],
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    train(second, optimizers[2], STREAM[stop:])
    assert_same(weights(second), weights(whole))


def wide():
    """Large enough for products that are rounded by the strides of their factors."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 70, 3), nn.Tanh(), nn.Flatten(), nn.Linear(630, 65), nn.Tanh(), nn.Linear(65, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_distributed_checkpoint_of_wide_layers(scaling, memory_format, tmp_path):
    """It gives every tensor back row-major, whatever it was: the run that goes on must have had them so."""
    stream = [(torch.randn(16, 3, 5, 5), torch.randint(3, (16,))) for _ in range(4)]
    whole, second = (wide().to(memory_format=memory_format) for _ in range(2))
    settings = {"scaling": scaling, "update_interval": 3, "trace_thresholds": (0.0, 0.0)}
    optimizer, resumed = (THOR(model, **settings) for model in (whole, second))
    train(whole, optimizer, stream[:2])
    model_state, optimizer_state = get_state_dict(whole, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
    model_state, optimizer_state = get_state_dict(second, resumed)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(second, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert_same_layout(optimizer, resumed)
    train(whole, optimizer, stream[2:])
    train(second, resumed, stream[2:])
    assert_same(weights(second), weights(whole))


def assert_same_layout(left, right):
    """The tensors of both states have the same strides."""
    pairs = zip(left.state.values(), right.state.values(), strict=True)
    for one, two in pairs:
        for key, value in one.items():
            assert not isinstance(value, torch.Tensor) or value.stride() == two[key].stride(), key


def test_state_that_comes_back_with_other_strides_is_put_in_ours():
    """Column-major inverses stood in checkpoints of earlier versions, and some formats store tensors row-major."""
    stream = [(torch.randn(16, 3, 5, 5), torch.randint(3, (16,))) for _ in range(3)]
    whole, second = (wide().to(memory_format=torch.channels_last) for _ in range(2))
    optimizer, resumed = THOR(whole, update_interval=3), THOR(second, update_interval=3)
    train(whole, optimizer, stream[:1])
    second.load_state_dict(whole.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.mT.contiguous().mT if value.dim() == 3 else value.contiguous()
    resumed.load_state_dict(saved)
    assert_same_layout(optimizer, resumed)
    train(whole, optimizer, stream[1:])
    train(second, resumed, stream[1:])
    assert_same(weights(second), weights(whole))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", DCP_OPTIONS.values(), ids=DCP_OPTIONS)
def test_distributed_checkpoint_with_a_callable_interval(options):
    """The callable belongs to the program: neither saved nor missed."""
    whole, first, second = build(), build(), build()
    optimizers = [THOR(model, **SETTINGS["callable"]) for model in (whole, first, second)]
    train(whole, optimizers[0], STREAM)
    train(first, optimizers[1], STREAM[:4])
    state = get_optimizer_state_dict(first, optimizers[1], options=options)
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, optimizers[2], copy.deepcopy(state), options=options)
    train(second, optimizers[2], STREAM[4:])
    assert_same(weights(second), weights(whole))


@pytest.mark.parametrize("options", DCP_OPTIONS.values(), ids=DCP_OPTIONS)
def test_distributed_checkpoint_with_groups(options):
    """Two groups with options of their own, damping scheduled meanwhile, `split_dim` None."""

    def setup():
        model = build()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "damping": 0.1, "split_dim": None},
            {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.01, "momentum": 0.5},
        ]
        return model, THOR(groups, model=model, update_interval=3)

    (whole, whole_optimizer), (first, optimizer), (second, resumed) = setup(), setup(), setup()
    for one, its_optimizer in ((whole, whole_optimizer), (first, optimizer)):
        its_optimizer.param_groups[0]["damping"] = 0.07
        train(one, its_optimizer, STREAM[:4])
    state = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=options))
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, resumed, state, options=options)
    assert [group["damping"] for group in resumed.param_groups] == [0.07, 0.03]
    train(whole, whole_optimizer, STREAM[4:])
    train(second, resumed, STREAM[4:])
    assert_same(weights(second), weights(whole))


def test_distributed_checkpoint_keeps_factors_float32(tmp_path):
    stream = in_dtype(STREAM, torch.bfloat16)
    whole, first, second = (build(torch.bfloat16) for _ in range(3))
    optimizers = [THOR(model, update_interval=3) for model in (whole, first, second)]
    train(whole, optimizers[0], stream)
    train(first, optimizers[1], stream[:4])
    set_optimizer_state_dict(second, optimizers[2], get_optimizer_state_dict(first, optimizers[1]))
    second.load_state_dict(first.state_dict())
    for state in optimizers[2].state.values():
        assert all(v.dtype == torch.float32 for v in state.values() if isinstance(v, torch.Tensor))
    train(second, optimizers[2], stream[4:])
    assert_same(weights(second), weights(whole))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_asking_a_fresh_optimizer_for_its_state_is_no_step(momentum, tensor_lr):
    model, twin = build(), build()
    lr = (lambda: torch.tensor(0.05)) if tensor_lr else (lambda: 0.05)
    settings = {"update_interval": 3, "momentum": momentum}
    optimizer, other = THOR(model, lr=lr(), **settings), THOR(twin, lr=lr(), **settings)
    before = weights(model)
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) >= {"0.weight", "3.weight", "5.weight"}
    assert_same(weights(model), before)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
    assert all(curvature.refreshes == 0 for curvature in optimizer.curvature.values())
    train(model, optimizer, STREAM)
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))


def test_constructor_of_accelerate_loads_the_fresh_state_back():
    """`optimizer.load_state_dict(optimizer.state_dict())` before the first step, as Accelerate does."""
    model, twin = build(), build()
    optimizer, other = THOR(model, update_interval=3), THOR(twin, update_interval=3)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, STREAM)
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))
