"""Stop anywhere, go on: the bits are those of a run that never stopped."""

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
from torch.nn.utils import prune

import every_kind
from tiny import assert_same, batches, renewed, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(8, dtype=torch.float32)
EVERY = {"trace_thresholds": (0.0, 0.0)}

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)

# --------------------------------------------------------------- ways from one optimizer to another


def round_trip(objects):
    """Through a file that loads without unpickling code."""
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def directly(one, other):
    """What was saved is a snapshot: the first goes on, and the other does not notice."""
    for each, into in zip(one, other, strict=True):
        into.load_state_dict(each.state_dict())


def by_state_dict(one, other):
    for state, into in zip(round_trip([each.state_dict() for each in one]), other, strict=True):
        into.load_state_dict(state)


def by_distributed_checkpoint(one, other, **options):
    """Into other weights. Fresh optimizers take a step of zero gradients, which must not count."""
    options = StateDictOptions(**options)
    kept = dict(zip(("model", "optimizer"), get_state_dict(*one, options=options), strict=True))
    with torch.no_grad():
        for parameter in other[0].parameters():
            parameter.add_(1.0)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(*other, options=options), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(kept, checkpoint_id=folder, no_dist=True)
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        *other,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    for group in other[1].param_groups:
        if "trace_thresholds" in group:
            group["trace_thresholds"] = tuple(group["trace_thresholds"])  # DCP makes a list of it


def in_memory(one, other):
    other[0].load_state_dict(one[0].state_dict())
    set_optimizer_state_dict(*other, copy.deepcopy(get_optimizer_state_dict(*one)))


def transposed(one, other):
    """Some formats give every tensor back row-major: the run that goes on must have them so."""
    saved = copy.deepcopy(one[1].state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.mT.contiguous().mT if value.dim() == 3 else value.contiguous()
    other[0].load_state_dict(one[0].state_dict())
    other[1].load_state_dict(saved)


FLAT = partial(by_distributed_checkpoint, flatten_optimizer_state_dict=True)
FULL = partial(by_distributed_checkpoint, full_state_dict=True, cpu_offload=True)
EVERY_WAY = [directly, by_state_dict, by_distributed_checkpoint, FLAT, FULL, in_memory, transposed]
# step -> the ways by which a run is stopped before it
THOROUGH = {0: EVERY_WAY, 4: EVERY_WAY, **{step: [by_state_dict] for step in (1, 2, 3, 5)}}
QUICK = {
    0: [by_distributed_checkpoint], 1: [transposed], 3: [by_state_dict], 4: [FLAT, FULL],
    5: [by_state_dict],
}  # fmt: skip
EACH = {step: [by_state_dict] for step in range(1, 6)}
IMAGES = [(torch.randn(16, 3, 5, 5), torch.randint(3, (16,))) for _ in range(6)]


def build(dtype=torch.float32):
    """A model with preconditioned and plain parameters, the same every time."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6), nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    ).to(dtype)  # fmt: skip


def thor(make=build, optimizer=THOR, **options):
    """What makes a model and its optimizer, the same each time."""

    def setup():
        model = make()
        return model, optimizer(model, **options)

    return setup


def wide():
    """Large enough for products that are rounded by the strides of their factors."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 70, 3), nn.Tanh(), nn.Flatten(), nn.Linear(630, 65), nn.Tanh(),
        nn.Linear(65, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip


class Late(nn.Module):
    """A layer is called in some steps, and a refresh waits for it; its weight is used in others."""

    def __init__(self, called, bypassed):
        super().__init__()
        torch.manual_seed(1)
        self.called, self.bypassed = called, bypassed
        self.body, self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        h, step = torch.tanh(self.body(x)), int(self.steps)
        self.steps += 1
        if step in self.called:
            return self.first(h) + self.second(h)
        return self.first(h) + (
            nn.functional.linear(h, self.second.weight) if self.bypassed else 0.0
        )


def late(called, otherwise):
    make = partial(Late, called, otherwise == "bypassed")
    model, optimizer = thor(make, update_interval=4, **EVERY)()
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=otherwise != "zeros")
    return model, optimizer


def frozen():
    model = build()
    model[3].requires_grad_(False)
    return model


def pruned():
    """As the program does: the optimizer, then the pruning."""
    model, optimizer = thor(update_interval=2)()
    prune.l1_unstructured(model[3], "weight", 0.4)
    return model, optimizer


def groups():
    """With options of their own, of which one changes in each step, and a scheduler's entry."""
    model = build()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    matrices = {"params": weights, "damping": 0.1, "split_dim": None}
    vectors = {"params": biases, "lr": 0.01, "momentum": 0.5}
    optimizer = THOR([matrices, vectors], model=model, update_interval=3)

    def schedule(optimizer, *_):
        group = optimizer.param_groups[0]
        group.update(damping=0.1 * 0.9 ** group["step"], initial_lr=group["step"])

    optimizer.register_step_post_hook(schedule)
    return model, optimizer


OPTIONS = {
    "defaults": {"update_interval": 3},
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
# what makes the model, and its batches; with some of the options
MODELS = {
    "bfloat16": (partial(build, torch.bfloat16), batches(8, dtype=torch.bfloat16)),
    "float64": (partial(build, torch.float64), batches(8)),
    "channels_last": (wide, IMAGES),
    "frozen": (frozen, STREAM),
    "every kind": (every_kind.build, every_kind.stream()),
}
# what makes a model and its optimizer, the batches, where it is stopped
RUNS = {
    **{f"perceptron, {name}": (thor(**OPTIONS[name]), STREAM, THOROUGH) for name in OPTIONS},
    **{
        f"{model}, {name}": (thor(make, **OPTIONS[name]), stream, QUICK)
        for model, (make, stream) in MODELS.items()
        for name in ("average, keep, stop", "average, split", "muon")
    },
    "groups": (groups, STREAM, THOROUGH),
    "pruned": (pruned, STREAM, EACH),
    **{
        f"called {called}, else {otherwise}": (partial(late, called, otherwise), STREAM, EACH)
        for called in ((2, 3, 5), (0, 1, 5, 6))
        for otherwise in ("nothing", "zeros", "bypassed")
    },
}


def keys_of(optimizer):
    return {index: sorted(state) for index, state in optimizer.state_dict()["state"].items()}


def strides(optimizer):
    states = optimizer.state_dict()["state"].items()
    tensors = [(i, k, v) for i, state in states for k, v in state.items() if torch.is_tensor(v)]
    return {(i, key): tensor.stride() for i, key, tensor in tensors}


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_never_having_stopped(name):
    """And the state has the same keys at any time, so that checkpoints of ranks fit together."""
    setup, stream, stops = RUNS[name]
    model, optimizer = setup()
    resumed, keys = [], None
    for step, batch in enumerate(stream):
        for number, carry in enumerate(stops.get(step, ())):
            twin, other = setup()
            carry((model, optimizer), (twin, other))
            for p, q in zip(twin.parameters(), model.parameters(), strict=True):
                # zeros, which momentum goes on with
                p.grad = None if q.grad is None else q.grad.clone()
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


def test_split_factors_are_stored_as_blocks_only():
    """Two factors and two inverses of blocks, and the momentum; no view of something larger."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = THOR(model, split_dim=8)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    size = io.BytesIO()
    torch.save(optimizer.state_dict(), size)
    assert size.tell() < 4 * (4 * 8 * 64 + 64 * 64) + 8000


@pytest.mark.parametrize("make", [THOR, ThorMuon])
def test_a_run_is_rolled_back(make):
    """After a bad epoch, more than once: rows gathered before the load belong to nobody."""
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


@pytest.mark.parametrize("make", [THOR, ThorMuon])
def test_other_code_replaces_tensors_of_the_state(make):
    """As offloading does between two steps, or a reset of the momentum."""
    (model, optimizer), (twin, plain) = thor(optimizer=make)(), thor(optimizer=make)()
    for batch in STREAM[:6]:
        train(model, optimizer, [batch])
        train(twin, plain, [batch])
        renewed(optimizer)
        assert_same(weights(model), weights(twin))
        assert_same(optimizer.state_dict(), plain.state_dict())
    for one in (optimizer, plain):
        for state in one.state.values():
            for key in state.keys() & {"momentum_buffer", "exp_avg"}:
                if one is optimizer:
                    state[key] = torch.zeros_like(state[key])
                else:
                    state[key].zero_()
    train(model, optimizer, STREAM[6:])
    train(twin, plain, STREAM[6:])
    assert_same(weights(model), weights(twin))
