"""Stop anywhere, go on, with layers that lie inside modules or behind what they compute from their weights."""

import copy
import pickle

import pytest
import torch
from test_state import round_trip
from timm.layers import ScaledStdConv2d
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

from tiny import assert_same, train, weights
from torch_thor import THOR, choose_split_dim

STEPS = 6


class Experts(nn.Module):
    """A linear layer a kind of token; kinds are missing in some batches."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 4) / 2)
        self.weight_bias = nn.Parameter(torch.zeros(4, 6))

    def forward(self, x, tokens):
        y = x.new_zeros(*x.shape[:-1], 6)
        for e in range(4):
            mine = tokens % 4 == e
            y[mine] = F.linear(x[mine], self.weight[e], self.weight_bias[e])
        return y


class Everything(nn.Module):
    """A scaled embedding, experts, recurrent layers, and a convolution with a standardised weight."""

    def __init__(self):
        super().__init__()
        self.embedding = BartScaledWordEmbedding(9, 4, None, embed_scale=2.0)
        self.experts = Experts()
        self.rnn = nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(6, 4)
        self.conv = ScaledStdConv2d(1, 3, 2)
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        h = self.experts(self.embedding(x), x)
        h = self.rnn(h)[0]
        state = None
        for t in range(h.shape[1]):
            state = self.cell(h[:, t], state)
        return self.head(self.conv(state.view(-1, 1, 2, 2)).flatten(1))


def build():
    torch.manual_seed(1)
    return Everything()


def stream():
    """Tokens of kind 3 come late, those of kind 0 go early."""
    generator = torch.Generator().manual_seed(4)
    kinds = [torch.randint(int(step > 2), 3 + (step > 1), (4, 5), generator=generator) for step in range(STEPS)]
    return [(kind, torch.randint(5, (4,), generator=generator)) for kind in kinds]


STREAM = stream()
SETTINGS = {
    "defaults": {"update_interval": 3},
    "average_split": {"update_interval": 1, "factor_decay": 0.5, "trace_thresholds": (0.0, 0.0), "split_dim": 3},
    "keep_stop": {"update_interval": 1, "trace_thresholds": (0.2, 0.1)},
    "spectral": {"update_interval": 2, "scaling": "spectral"},
}


@pytest.mark.parametrize("stop", [2, 3, 5])  # tokens of one kind have been seen from step 3 on
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
def test_copy_of_both_goes_on(how):
    model = build()
    optimizer = THOR(model, update_interval=2)
    train(model, optimizer, STREAM[:2])
    pair = (model, optimizer)
    twin, twin_optimizer = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train(model, optimizer, STREAM[2:])
    train(twin, twin_optimizer, STREAM[2:])
    assert_same(weights(twin), weights(model))
    assert_same(twin_optimizer.state_dict(), optimizer.state_dict())


def test_state_of_each_kind():
    """The same keys at any time; experts have a T each, kept by those without rows."""
    model = build()
    optimizer = THOR(model, update_interval=1, trace_thresholds=(0.0, 0.0))
    train(model, optimizer, STREAM[:1])
    keys = {index: sorted(state) for index, state in optimizer.state_dict()["state"].items()}
    state = optimizer.state[model.experts.weight]
    assert state["A"].shape == (4, 4, 4)
    assert state["G_inverse"].shape == (4, 6, 6)
    before = state["group_rows_per_term"].clone()
    assert before[3] == 0 < before[0]
    train(model, optimizer, STREAM[1:])
    assert {i: sorted(s) for i, s in optimizer.state_dict()["state"].items()} == keys
    state = optimizer.state[model.experts.weight]
    assert state["group_rows_per_term"][3] > 0
    assert optimizer.state[model.rnn.weight_hh_l1_reverse]["G"].shape == (12, 12)
    assert optimizer.state[model.conv.weight]["A"].shape == (1, 4, 4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process")
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_round_trip(flat, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    whole, first, second = build(), build(), build()
    optimizers = [THOR(model, update_interval=2, split_dim=3) for model in (whole, first, second)]
    train(whole, optimizers[0], STREAM)
    train(first, optimizers[1], STREAM[:3])
    model_state, optimizer_state = get_state_dict(first, optimizers[1], options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
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
    train(second, optimizers[2], STREAM[3:])
    assert_same(weights(second), weights(whole))


def test_converted_models_state_follows():
    """After ``model.double()`` the T of experts is of the factors' precision, and training goes on."""
    model = build()
    optimizer = THOR(model, update_interval=2)
    train(model, optimizer, STREAM[:3])
    model.double()
    train(model, optimizer, STREAM[3:])
    assert optimizer.state[model.experts.weight]["group_rows_per_term"].dtype == torch.float64


def test_the_split_can_be_chosen():
    choice = choose_split_dim(build(), STREAM[0])
    assert choice.split_dim >= 1
