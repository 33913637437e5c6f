"""Recurrent layers step by step, as on refresh steps: they compute what the fused kernels do."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from torch_thor.capture.composites.recurrence import RecurrenceMode

KINDS = {
    "lstm": lambda **o: nn.LSTM(3, 4, **o),
    "lstm_projected": lambda **o: nn.LSTM(3, 4, proj_size=2, **o),
    "gru": lambda **o: nn.GRU(3, 4, **o),
    "rnn": lambda **o: nn.RNN(3, 4, **o),
    "rnn_relu": lambda **o: nn.RNN(3, 4, nonlinearity="relu", **o),
}
OPTIONS = {
    "one": {},
    "batch_first_no_bias": {"batch_first": True, "bias": False},
    "two_ways": {"bidirectional": True},
    "deep": {"num_layers": 3, "bidirectional": True, "batch_first": True},
    "dropout": {"num_layers": 2, "dropout": 0.5},
    "dropout_batch_first": {"num_layers": 2, "dropout": 0.5, "batch_first": True, "bidirectional": True},
}
INPUTS = {
    "batch": lambda: torch.randn(5, 2, 3).double(),
    "alone": lambda: torch.randn(5, 3).double(),
    "packed": lambda: pack_sequence([torch.randn(n, 3).double() for n in (4, 2, 5)], enforce_sorted=False),
}


def tensors(result):
    """All that a recurrent layer returns."""
    output, states = result
    return [
        output if isinstance(output, torch.Tensor) else output.data,
        *(states if isinstance(states, tuple) else [states]),
    ]


@pytest.mark.parametrize("data", INPUTS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", KINDS)
def test_step_by_step_is_the_fused_function(name, options, data):
    """Values, gradients and masks of dropout; and every weight is seen."""
    module, x = KINDS[name](**OPTIONS[options]).double(), INPUTS[data]()
    seen, results = set(), []
    for opened in (False, True):
        torch.manual_seed(5)
        if opened:
            with RecurrenceMode(module._flat_weights_names, lambda name, *_: seen.add(name)):
                results.append(tensors(module(x)))
        else:
            results.append(tensors(module(x)))
    for fused, own in zip(*results, strict=True):
        torch.testing.assert_close(own, fused)
    wanted, found = (torch.autograd.grad(sum((y**3).sum() for y in r), module.parameters()) for r in results)
    torch.testing.assert_close(found, wanted)
    assert seen == {weight for weight, _ in module.named_parameters() if weight.startswith("weight")}


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_autocast(name):
    """The same precision comes out as from the fused function."""
    module, x = KINDS[name](num_layers=2), torch.randn(5, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            wanted = module(x)[0]
        except RuntimeError as error:
            pytest.skip(f"without THOR, too, this processor has no {name} in bfloat16: {error}")
        with RecurrenceMode(module._flat_weights_names, lambda *_: None):
            found = module(x)[0]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
