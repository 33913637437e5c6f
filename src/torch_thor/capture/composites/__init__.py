"""Composite modules: modules that compute several layers in their own forward, one file per family.

A new family is a file that says which layers a module has and which hook reports their calls, and one line below.
"""

from torch import nn

from torch_thor.capture.composites.attention import ATTENTION
from torch_thor.capture.composites.experts import EXPERTS, is_experts
from torch_thor.capture.composites.hook import CompositeHook, Report
from torch_thor.capture.composites.recurrent import RECURRENT
from torch_thor.capture.composites.registry import (
    InnerLayer,
    composite_of,
    register_built_in,
    register_composite,
    register_found,
)

__all__ = ["CompositeHook", "InnerLayer", "Report", "composite_of", "register_composite"]

register_built_in(nn.MultiheadAttention, ATTENTION)
for _recurrent in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    register_built_in(_recurrent, RECURRENT)
register_found(is_experts, EXPERTS)
