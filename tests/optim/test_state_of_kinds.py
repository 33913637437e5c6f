"""Stop anywhere, go on, every kind of layer: fused attention, embeddings, transposed convolutions, a tied weight."""

import copy
import pickle

import pytest
import torch
from test_state import DCP_OPTIONS, EVERY, assert_resumes, by_distributed_checkpoint, keys_of, thor
from torch import nn

from tiny import assert_same, train, weights
from torch_thor import THOR

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)
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
    "defaults": thor(build, update_interval=3),
    "nesterov_decay_clip": thor(build, update_interval=3, nesterov=True, weight_decay=0.1, kl_clip=1e-3, split_dim=3),
    "average_keep_stop": thor(build, update_interval=1, factor_decay=0.5, trace_thresholds=(0.2, 0.1)),
    "left_out": thor(build, update_interval=2, layers=["-attention.k_proj", "-norm"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_never_having_stopped(name):
    """Stopped after a refresh, before one, and after some layers have stopped."""
    assert_resumes(SETTINGS[name], (1, 3, 5), STREAM)


@pytest.mark.parametrize("how", DCP_OPTIONS)
def test_distributed_checkpoint(how, tmp_path):
    setup = thor(build, update_interval=3, split_dim=3, weight_decay=0.01, **EVERY)
    assert_resumes(setup, (0, 4), STREAM, by_distributed_checkpoint(tmp_path, how))


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
        assert fused[f"{part}_A"].numel() == fused[f"{part}_A_inverse"].numel() == 4 * 4
        assert fused[f"{part}_refreshes"] == 1
    assert fused["G"].shape == fused["G_inverse"].shape == (12, 4)
    sizes = {model.cross.k_proj_weight: 2 * 2, model.embedding.weight: 9, model.transposed.weight: 4 * 4}
    for parameter, size in {**sizes, model.conv.weight: 2 * 4 * 4}.items():
        assert optimizer.state[parameter]["A"].numel() == size
    for parameter in (model.norm.weight, model.cross.bias_k, model.attention.in_proj_bias):
        assert set(optimizer.state[parameter]) == {"preconditioned", "momentum_buffer"}
    assert set(optimizer.state) == set(model.parameters())


def test_state_has_the_same_keys_before_and_after_any_step():
    model, optimizer = SETTINGS["average_keep_stop"]()
    train(model, optimizer, STREAM[:1])
    keys = keys_of(optimizer)
    for batch in STREAM[1:]:
        train(model, optimizer, [batch])
        assert keys_of(optimizer) == keys


def test_the_state_of_another_model_is_refused():
    """With another vocabulary, another width, and another width of an attention; the layer is named."""
    cases = [(nn.Embedding(9, 4), nn.Embedding(8, 4), "0"), (nn.Embedding(9, 4), nn.Embedding(9, 3), "0")]
    for saved, other, name in [*cases, (nn.MultiheadAttention(4, 1), nn.MultiheadAttention(6, 1), r"0\.q_proj")]:
        model = nn.Sequential(saved)
        optimizer = THOR(model)
        x = torch.randn(3, 2, 4)
        output = saved(x, x, x)[0] if name != "0" else model(STREAM[0][0])
        output.square().mean().backward()
        optimizer.step()
        with pytest.raises(ValueError, match=f"layer '{name}'"):
            THOR(nn.Sequential(other)).load_state_dict(optimizer.state_dict())
