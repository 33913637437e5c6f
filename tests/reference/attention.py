"""Multi-head attention written out: four linear layers, and a softmax a head and a sequence."""

import torch
from torch import nn

from reference.layers import Layer

PARTS = ("q", "k", "v")


def attention_layers(model: nn.Module, name: str) -> dict[str, Layer]:
    """The four layers of an attention, as parts of its parameters."""
    module = model.get_submodule(name)
    dot = f"{name}." if name else ""
    size = module.embed_dim
    layers = {}
    for i, part in enumerate(PARTS):
        mine = slice(i * size, (i + 1) * size)
        biases = {} if module.in_proj_bias is None else {f"{dot}in_proj_bias": mine}
        if module.in_proj_weight is not None:
            weight = Layer(None, f"{dot}in_proj_weight", mine, biases)
        else:
            weight = Layer(None, f"{dot}{part}_proj_weight", slice(None), biases)
        layers[f"{dot}{part}_proj"] = weight
    biases = {} if module.out_proj.bias is None else {f"{dot}out_proj.bias": slice(None)}
    layers[f"{dot}out_proj"] = Layer(None, f"{dot}out_proj.weight", slice(None), biases)
    for part, layer in layers.items():
        layer.calls = [part]
    return layers


def scores_to_add(mask: torch.Tensor | None) -> torch.Tensor | float:
    """A mask is added to the scores; minus infinity where a boolean mask is True."""
    if mask is None:
        return 0.0
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)
    return mask


def projections(module, inputs):
    """Queries, keys and values."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.split(module.embed_dim)
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    biases = [0.0] * 3
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.split(module.embed_dim)
    return [x @ weight.T + bias for x, weight, bias in zip(inputs, weights, biases, strict=True)]


def attention_by_hand(module, name, query, key, value, *, key_padding_mask=None, attn_mask=None):
    """(output, weights averaged over the heads, [(layer name, x, y)]).

    Inputs are shaped as the module takes them.
    """
    dot = f"{name}." if name else ""
    has_batch = query.dim() == 3
    swap = has_batch and not module.batch_first
    if swap:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    projected = projections(module, (query, key, value))
    seen = [
        (f"{dot}{part}_proj", x, y)
        for part, x, y in zip(PARTS, (query, key, value), projected, strict=True)
    ]
    q, k, v = (t if has_batch else t[None] for t in projected)
    padding = None if key_padding_mask is None else key_padding_mask.reshape(len(q), -1)
    size = module.embed_dim // module.num_heads
    sequences, averages = [], []
    for n in range(len(q)):
        heads, shares = [], []
        for h in range(module.num_heads):
            mine = slice(h * size, (h + 1) * size)
            queries, keys, values = q[n, :, mine], k[n, :, mine], v[n, :, mine]
            mask = attn_mask
            if mask is not None and mask.dim() == 3:
                mask = mask[n * module.num_heads + h]
            scores = queries @ keys.T / size**0.5 + scores_to_add(mask)
            scores = scores + scores_to_add(None if padding is None else padding[n])
            if module.bias_k is not None:
                more = queries @ module.bias_k[0, 0, mine][:, None] / size**0.5
                scores = torch.cat([scores, more], 1)
                values = torch.cat([values, module.bias_v[0, :, mine]])
            if module.add_zero_attn:
                scores = torch.cat([scores, torch.zeros_like(scores[:, :1])], 1)
                values = torch.cat([values, torch.zeros_like(values[:1])])
            shares.append(scores.softmax(1))
            heads.append(shares[-1] @ values)
        sequences.append(torch.cat(heads, 1))
        averages.append(torch.stack(shares).mean(0))
    x = torch.stack(sequences) if has_batch else sequences[0]
    y = x @ module.out_proj.weight.T
    if module.out_proj.bias is not None:
        y = y + module.out_proj.bias
    seen.append((f"{dot}out_proj", x, y))
    average = torch.stack(averages) if has_batch else averages[0]
    return y.transpose(0, 1) if swap else y, average, seen
