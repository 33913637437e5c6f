"""Recurrent layers written out: each sequence, each step, the gates as torch documents them."""

import torch
from torch import nn

from reference.layers import Layer


def recurrent_layers(model: nn.Module, name: str) -> dict[str, Layer]:
    """A layer for each weight, with the bias that is added to its product."""
    module = model.get_submodule(name)
    layers = {}
    for weight, _ in module.named_parameters():
        if weight.startswith("weight_"):
            bias = weight.replace("weight", "bias")
            biases = {f"{name}.{bias}": slice(None)} if hasattr(module, bias) else {}
            layers[f"{name}.{weight}"] = Layer(
                None, f"{name}.{weight}", biases=biases, calls=[f"{name}.{weight}"]
            )
    return layers


def step_by_hand(module, x, states, product):
    """The states after one step of one sequence; `product(which, row)` is W row + b of a weight."""
    kind = type(module).__name__.removesuffix("Cell")
    from_input, from_hidden = product("ih", x), product("hh", states[0])
    size = module.hidden_size
    a, b = (
        [gates[k * size : (k + 1) * size] for k in range(len(gates) // size)]
        for gates in (from_input, from_hidden)
    )
    if kind == "LSTM":
        i, f, g, o = (p + q for p, q in zip(a, b, strict=True))
        c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return [product("hr", h) if getattr(module, "proj_size", 0) else h, c]
    if kind == "GRU":
        r, z = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
        return [(1 - z) * torch.tanh(a[2] + r * b[2]) + z * states[0]]
    activation = torch.relu if getattr(module, "nonlinearity", "tanh") == "relu" else torch.tanh
    return [activation(a[0] + b[0])]


def sequence_by_hand(module, name, x):
    """What comes of one (L, in).

    (outputs (L, ·), the last states of the last layer's directions, [(weight, row, product)])
    """
    seen, layer_input, last = [], x, []
    for layer in range(module.num_layers):
        outputs, last = [], []
        for suffix in ("", "_reverse") if module.bidirectional else ("",):

            def product(which, row, end=f"l{layer}{suffix}"):
                y = getattr(module, f"weight_{which}_{end}") @ row
                bias = getattr(module, f"bias_{which}_{end}", None)
                y = y if bias is None else y + bias
                seen.append((f"{name}.weight_{which}_{end}", row, y))
                return y

            states = [x.new_zeros(module.proj_size or module.hidden_size)]
            states += [x.new_zeros(module.hidden_size)] if isinstance(module, nn.LSTM) else []
            found = {}
            for t in reversed(range(len(x))) if suffix else range(len(x)):
                states = step_by_hand(module, layer_input[t], states, product)
                found[t] = states[0]
            outputs.append(torch.stack([found[t] for t in range(len(x))]))
            last.append(states[0])
        layer_input = torch.cat(outputs, 1)
    return layer_input, torch.cat(last), seen
