"""Recurrent layers step by step, as on refresh steps: they compute what the fused kernels do."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from torch_thor.capture.composites.recurrence import RecurrentHook

KINDS = {
    "lstm": lambda **o: nn.LSTM(3, 4, **o),
    "lstm_projected": lambda **o: nn.LSTM(3, 4, proj_size=2, **o),
    "gru": lambda **o: nn.GRU(3, 4, **o),
    "rnn": lambda **o: nn.RNN(3, 4, **o),
    "rnn_relu": lambda **o: nn.RNN(3, 4, nonlinearity="relu", **o),
}
OPTIONS = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 3, "bidirectional": True},
    {"num_layers": 2, "dropout": 0.5, "batch_first": True, "bidirectional": True},
]


@pytest.mark.parametrize("name", KINDS)
def test_step_by_step_is_the_fused_function(name):
    """Values, gradients and masks of dropout; a batch, a single sequence, packed sequences."""
    packed = pack_sequence([torch.randn(n, 3).double() for n in (4, 2, 5)], enforce_sorted=False)
    inputs = torch.randn(5, 2, 3).double(), torch.randn(5, 3).double(), packed
    for options, x in product(OPTIONS, inputs):
        module, seen, results = KINDS[name](**options).double(), set(), []
        step_by_step = RecurrentHook(module).mode(lambda name, *_, seen=seen: seen.add(name))
        for mode in (nullcontext(), step_by_step):
            torch.manual_seed(5)
            with mode:
                output, states = module(x)
            output = output if isinstance(output, torch.Tensor) else output.data
            states = states if isinstance(states, tuple) else [states]
            loss = sum((y**3).sum() for y in (output, *states))
            results.append([output, *states, *torch.autograd.grad(loss, module.parameters())])
        torch.testing.assert_close(results[1], results[0])
        assert seen == {key for key, _ in module.named_parameters() if key.startswith("weight")}


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_autocast(name):
    """The same precision comes out as from the fused function."""
    module, x = KINDS[name](num_layers=2), torch.randn(5, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            wanted = module(x)[0]
        except RuntimeError as error:
            pytest.skip(f"without THOR, too, this processor has no {name} in bfloat16: {error}")
        with RecurrentHook(module).mode(lambda *_: None):
            found = module(x)[0]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
