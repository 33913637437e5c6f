"""Stop anywhere, go on, with layers that lie inside modules or behind what they compute from their weights."""

import pytest
import torch
from test_state import EVERY, assert_resumes, by_distributed_checkpoint, keys_of, thor
from timm.layers import ScaledStdConv2d
from torch import nn
from torch.nn import functional as F
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

from tiny import train
from torch_thor import THOR, ThorMuon, choose_split_dim

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)

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
    "defaults": thor(build, update_interval=3),
    "average_split": thor(build, update_interval=1, factor_decay=0.5, split_dim=3, **EVERY),
    "keep_stop": thor(build, update_interval=1, trace_thresholds=(0.2, 0.1)),
    "thor_muon": thor(build, ThorMuon, update_interval=2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_never_having_stopped(name, tmp_path):
    """Tokens of one kind have been seen from step 3 on."""
    assert_resumes(SETTINGS[name], (2, 3, 5), STREAM)
    assert_resumes(SETTINGS[name], (3,), STREAM, by_distributed_checkpoint(tmp_path, "plain"))
    assert_resumes(SETTINGS[name], (3,), STREAM, by_distributed_checkpoint(tmp_path, "flat"))


def test_state_of_each_kind():
    """The same keys at any time; experts have a T each, kept by those without rows."""
    model = build()
    optimizer = THOR(model, update_interval=1, trace_thresholds=(0.0, 0.0))
    train(model, optimizer, STREAM[:1])
    keys = keys_of(optimizer)
    state = optimizer.state[model.experts.weight]
    assert state["A"].numel() == 4 * 4 * 4
    assert state["G_inverse"].numel() == 4 * 6 * 6
    before = state["group_rows_per_term"].clone()
    assert before[3] == 0 < before[0]
    train(model, optimizer, STREAM[1:])
    assert keys_of(optimizer) == keys
    state = optimizer.state[model.experts.weight]
    assert state["group_rows_per_term"][3] > 0
    assert optimizer.state[model.rnn.weight_hh_l1_reverse]["G"].shape == (12, 12)
    assert optimizer.state[model.conv.weight]["A"].numel() == 4 * 4


def test_converted_models_state_follows():
    """After ``model.double()`` the T of experts is of the factors' precision, and training goes on."""
    model = build()
    optimizer = THOR(model, update_interval=2)
    train(model, optimizer, STREAM[:3])
    model.double()
    train(model, optimizer, STREAM[3:])
    assert optimizer.state[model.experts.weight]["group_rows_per_term"].dtype == torch.float64


def test_the_split_can_be_chosen():
    assert choose_split_dim(build(), STREAM[0]).split_dim >= 1
