"""Stop anywhere, go on, every kind of layer: fused attention, embeddings, transposed convolutions, a tied weight."""

import copy
import pickle

import pytest
import torch
from test_state import round_trip
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tiny import assert_same, train, weights
from torch_thor import THOR

STEPS = 6


class Everything(nn.Module):
    """One of each kind, with a decoder that is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(4, 1, batch_first=True, kdim=2, vdim=2, add_bias_kv=True)
        self.conv = nn.Conv1d(4, 2, 2, groups=2)
        self.transposed = nn.ConvTranspose1d(2, 4, 2)
        self.last = nn.RMSNorm(4)
        self.decoder = nn.Linear(4, 9)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        h = self.norm(self.embedding(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        narrow = torch.tanh(self.conv(h.mT))
        h = h + self.cross(h, narrow.mT, narrow.mT)[0] + self.transposed(narrow).mT
        return self.decoder(self.last(h))


def build():
    torch.manual_seed(1)
    return Everything()


def stream():
    generator = torch.Generator().manual_seed(4)
    return [tuple(torch.randint(9, (4, 5), generator=generator) for _ in range(2)) for _ in range(STEPS)]


STREAM = stream()
SETTINGS = {
    "defaults": {"update_interval": 3},
    "nesterov_decay_clip": {
        "update_interval": 3, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3, "split_dim": 3,
    },
    "average_keep_stop": {"update_interval": 1, "factor_decay": 0.5, "trace_thresholds": (0.2, 0.1)},
    "skipped": {"update_interval": 2, "skip": ["attention.k_proj", "norm"]},
}  # fmt: skip


@pytest.mark.parametrize("stop", [1, 3, 5])  # after a refresh, before one, after some layers have stopped
@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_never_having_stopped(name, stop):
    whole, first, second = build(), build(), build()
    optimizers = [THOR(model, **SETTINGS[name]) for model in (whole, first, second)]
    train(whole, optimizers[0], STREAM)
    train(first, optimizers[1], STREAM[:stop])
    saved = round_trip([first.state_dict(), optimizers[1].state_dict()])
    second.load_state_dict(saved[0])
    optimizers[2].load_state_dict(saved[1])
    train(second, optimizers[2], STREAM[stop:])
    assert_same(weights(second), weights(whole))
    assert_same(optimizers[2].state_dict(), optimizers[0].state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_copy_of_both_goes_on(how, steps):
    model = build()
    optimizer = THOR(model, update_interval=3)
    train(model, optimizer, STREAM[:steps])
    if how == "deepcopy":
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
    else:
        twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    assert twin.decoder.weight is twin.embedding.weight
    train(model, optimizer, STREAM[steps:])
    train(twin, twin_optimizer, STREAM[steps:])
    assert_same(weights(twin), weights(model))
    assert_same(twin_optimizer.state_dict(), optimizer.state_dict())


def test_copy_of_the_model_on_a_refresh_step_has_no_hooks_that_work():
    """An average of the weights is copied while attention's hooks are on; its passes are nobody's statistics."""
    model, plain = build(), build()
    optimizers = THOR(model, update_interval=1), THOR(plain, update_interval=1)
    for batch in STREAM[:3]:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(batch[0]).square().mean().backward()
        train(model, optimizers[0], [batch])
        train(plain, optimizers[1], [batch])
    assert_same(weights(model), weights(plain))
    again = THOR(twin)
    train(twin, again, STREAM[3:4])
    assert all(curvature.refreshes == 1 for curvature in again.curvature.values())


def test_state_of_each_kind():
    """A fused weight holds three layers' factors, an embedding's A its diagonal; norms have momentum only."""
    model = build()
    optimizer = THOR(model)
    train(model, optimizer, STREAM[:1])
    fused = optimizer.state[model.attention.in_proj_weight]
    for part in "qkv":
        assert fused[f"{part}_A"].shape == fused[f"{part}_A_inverse"].shape == (1, 4, 4)
        assert fused[f"{part}_refreshes"] == 1
    assert fused["G"].shape == fused["G_inverse"].shape == (12, 4)
    assert optimizer.state[model.cross.k_proj_weight]["A"].shape == (1, 2, 2)
    assert optimizer.state[model.embedding.weight]["A"].shape == (9, 1)
    assert optimizer.state[model.transposed.weight]["A"].shape == (1, 4, 4)
    assert optimizer.state[model.conv.weight]["A"].shape == (2, 4, 4)
    for parameter in (model.norm.weight, model.cross.bias_k, model.attention.in_proj_bias):
        assert set(optimizer.state[parameter]) == {"preconditioned", "momentum_buffer"}
    assert set(optimizer.state) == set(model.parameters())


def test_state_has_the_same_keys_before_and_after_any_step():
    model = build()
    optimizer = THOR(model, update_interval=2, trace_thresholds=(0.1, 0.05))
    train(model, optimizer, STREAM[:1])
    keys = {index: sorted(state) for index, state in optimizer.state_dict()["state"].items()}
    for batch in STREAM[1:]:
        train(model, optimizer, [batch])
        assert {i: sorted(s) for i, s in optimizer.state_dict()["state"].items()} == keys


@pytest.mark.parametrize("other", [nn.Embedding(8, 4), nn.Embedding(9, 3)], ids=["vocabulary", "width"])
def test_loading_another_vocabulary_is_refused(other):
    saved = nn.Sequential(nn.Embedding(9, 4))
    optimizer = THOR(saved)
    saved(STREAM[0][0]).square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="layer '0'"):
        THOR(nn.Sequential(other)).load_state_dict(optimizer.state_dict())


def test_loading_another_attention_is_refused():
    saved, other = (nn.ModuleDict({"attn": nn.MultiheadAttention(width, 1)}) for width in (4, 6))
    optimizer = THOR(saved)
    x = torch.randn(3, 2, 4)
    saved["attn"](x, x, x)[0].square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"layer 'attn\.q_proj'"):
        THOR(other).load_state_dict(optimizer.state_dict())


DCP_OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process")
@pytest.mark.parametrize("stop", [0, 4])
@pytest.mark.parametrize("options", DCP_OPTIONS.values(), ids=DCP_OPTIONS)
def test_distributed_checkpoint_round_trip(options, stop, tmp_path):
    settings = {"update_interval": 3, "trace_thresholds": (0.0, 0.0), "split_dim": 3, "weight_decay": 0.01}
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
