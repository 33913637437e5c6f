"""A run that is stopped anywhere and resumed has the bits of a run that was not stopped."""

import copy
import io
import tempfile
from functools import partial

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

import every_kind
from tiny import assert_same, batches, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(8, dtype=torch.float32)
EVERY = {"trace_thresholds": (0.0, 0.0)}

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)

# ---- ways to carry (model, optimizer) into others ------------------------------------------------


def round_trip(objects):
    """Save to a file and load it without unpickling code."""
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def directly(source, target):
    """Load the state dicts themselves; the source goes on, which must not change the target."""
    for saved, into in zip(source, target, strict=True):
        into.load_state_dict(saved.state_dict())


def by_state_dict(source, target):
    states = round_trip([saved.state_dict() for saved in source])
    for state, into in zip(states, target, strict=True):
        into.load_state_dict(state)


def by_distributed_checkpoint(source, target, **options):
    """Load into other weights. A fresh optimizer takes a step of zeros, which must not count."""
    options, parts = StateDictOptions(**options), ("model", "optimizer")
    kept = dict(zip(parts, get_state_dict(*source, options=options), strict=True))
    with torch.no_grad():
        for parameter in target[0].parameters():
            parameter.add_(1.0)
    loaded = dict(zip(parts, get_state_dict(*target, options=options), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(kept, checkpoint_id=folder, no_dist=True)
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        *target,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    for group in target[1].param_groups:
        if "trace_thresholds" in group:
            group["trace_thresholds"] = tuple(group["trace_thresholds"])  # DCP makes a list of it


def in_memory(source, target):
    target[0].load_state_dict(source[0].state_dict())
    set_optimizer_state_dict(*target, copy.deepcopy(get_optimizer_state_dict(*source)))


def transposed(source, target):
    """Load a state dict of a format that changes the strides of tensors."""
    saved = copy.deepcopy(source[1].state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.mT.contiguous().mT if value.dim() == 3 else value.contiguous()
    target[0].load_state_dict(source[0].state_dict())
    target[1].load_state_dict(saved)


FLAT = partial(by_distributed_checkpoint, flatten_optimizer_state_dict=True)
FULL = partial(by_distributed_checkpoint, full_state_dict=True, cpu_offload=True)
EVERY_WAY = [directly, by_state_dict, by_distributed_checkpoint, FLAT, FULL, in_memory, transposed]
# step -> the ways in which the run is carried on from before it
THOROUGH = {0: EVERY_WAY, 4: EVERY_WAY, **{step: [by_state_dict] for step in (1, 2, 3, 5)}}
QUICK = {0: [by_distributed_checkpoint], 1: [transposed], 3: [by_state_dict], 4: [FLAT, FULL]}
IMAGES = [(torch.randn(16, 3, 5, 5), torch.randint(3, (16,))) for _ in range(6)]


def build(dtype=torch.float32):
    """Return a model with and without preconditioned parameters, the same every time."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6), nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    ).to(dtype)  # fmt: skip


def thor(make=build, optimizer=THOR, **options):
    """Return a function that makes a model and its optimizer."""

    def setup():
        model = make()
        return model, optimizer(model, **options)

    return setup


def wide():
    """Return a model so large that the strides of factors change how products are rounded."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 70, 3), nn.Tanh(), nn.Flatten(), nn.Linear(630, 65), nn.Tanh(),
        nn.Linear(65, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def grouped():
    """Return a model, and THOR with options for matrices and for the other parameters."""
    model = build()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "damping": 0.1, "split_dim": None},
        {"params": vectors, "lr": 0.01, "momentum": 0.5},
    ]
    return model, THOR(groups, model=model, update_interval=3)


OPTIONS = {
    "decay, clip, split": {
        "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3, "split_dim": 3, **EVERY
    },
    "average, keep, stop": {
        "update_interval": 1, "factor_decay": 0.5, "trace_thresholds": (0.2, 0.1)
    },
    "average, split": {
        "lr": torch.tensor(0.05), "update_interval": 2, "factor_decay": 0.5, "split_dim": 4, **EVERY
    },
    "without momentum": {
        "update_interval": lambda step: 3 if step == 0 else 1, "momentum": 0.0, **EVERY
    },
    "left out": {
        "update_interval": 2, "layers": lambda name, _: not name.endswith(("3", "k_proj", "norm"))
    },
    "muon": {"optimizer": ThorMuon, "weight_decay": 0.4, "update_interval": 2, "factor_decay": 0.3},
}  # fmt: skip
# model -> the function that makes it, its batches
MODELS = {
    "bfloat16": (partial(build, torch.bfloat16), batches(8, dtype=torch.bfloat16)),
    "float64": (partial(build, torch.float64), batches(8)),
    "channels_last": (wide, IMAGES),
    "every kind": (every_kind.build, every_kind.stream()),
}
# run -> the function that makes a model and its optimizer, the batches, the ways by step
RUNS = {
    **{f"perceptron, {name}": (thor(**OPTIONS[name]), STREAM, THOROUGH) for name in OPTIONS},
    **{
        f"{model}, {name}": (thor(make, **OPTIONS[name]), stream, QUICK)
        for model, (make, stream) in MODELS.items()
        for name in ("average, split", "muon")
    },
    "groups": (grouped, STREAM, THOROUGH),
}


def keys_of(optimizer):
    return {index: sorted(state) for index, state in optimizer.state_dict()["state"].items()}


def strides(optimizer):
    states = optimizer.state_dict()["state"].items()
    tensors = [(i, k, v) for i, state in states for k, v in state.items() if torch.is_tensor(v)]
    return {(i, key): tensor.stride() for i, key, tensor in tensors}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_a_run_that_was_not_stopped(name):
    """The state has the same keys at any time, so that checkpoints of ranks fit together."""
    setup, stream, stops = RUNS[name]
    model, optimizer = setup()
    resumed, keys = [], None
    for step, batch in enumerate(stream):
        for number, carry in enumerate(stops.get(step, ())):
            twin, other = setup()
            carry((model, optimizer), (twin, other))
            where = f"stopped before step {step} by way {number}"
            assert strides(other) == strides(optimizer), where
            resumed.append((where, step, twin, other))
        train(model, optimizer, [batch])
        keys = keys or keys_of(optimizer)
        assert keys_of(optimizer) == keys
    for where, step, twin, other in resumed:
        train(twin, other, stream[step:])
        assert_same(weights(twin), weights(model), f"{where}: weights")
        assert_same(other.state_dict(), optimizer.state_dict(), f"{where}: state")
    assert set(optimizer.state) <= set(model.parameters())
    for parameter, state in optimizer.state.items():
        own = torch.promote_types(parameter.dtype, torch.float32)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == (torch.float32 if key == "step" else own), key
            else:
                assert isinstance(value, int | float), key


def test_only_the_blocks_of_split_factors_are_stored():
    """The file has blocks of two factors and two inverses, and the momentum."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = THOR(model, split_dim=8)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    size = io.BytesIO()
    torch.save(optimizer.state_dict(), size)
    assert size.tell() < 4 * (4 * 8 * 64 + 64 * 64) + 8000


@pytest.mark.parametrize("make", [THOR, ThorMuon])
def test_a_run_can_be_rolled_back_more_than_once(make):
    """Rows that were gathered before the state is loaded do not count."""
    model, optimizer = thor(optimizer=make, update_interval=1)()
    train(model, optimizer, STREAM[:2])
    saved, ends = round_trip([model.state_dict(), optimizer.state_dict()]), []
    for again in range(3):
        if again:
            model(100 * STREAM[2][0]).square().mean().backward()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            optimizer.zero_grad()
        train(model, optimizer, STREAM[3:6])
        ends.append(weights(model))
    assert_same(ends[1:], ends[:1] * 2)
