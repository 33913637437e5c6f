"""Composite modules: modules that compute several layers in their own forward, one file per family.

A new family is a file that says which layers a module has and which hook reports their calls, and
one line below.
"""

from torch import nn

from torch_thor.capture.composites.attention import AttentionHook, projections
from torch_thor.capture.composites.declarations import (
    COMPOSITES,
    Composite,
    InnerLayer,
    composite_of,
    register_composite,
)
from torch_thor.capture.composites.fused_experts import ExpertsHook, expert_layers, expert_weights
from torch_thor.capture.composites.recurrence import RecurrentHook, gate_layers
from torch_thor.capture.hooks import CompositeHook, Report

__all__ = ["CompositeHook", "InnerLayer", "Report", "composite_of", "register_composite"]

COMPOSITES.classes[nn.MultiheadAttention] = Composite(
    projections, AttentionHook, with_children=True
)
for _recurrent in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    COMPOSITES.classes[_recurrent] = Composite(gate_layers, RecurrentHook)
COMPOSITES.tests.append((expert_weights, Composite(expert_layers, ExpertsHook)))
