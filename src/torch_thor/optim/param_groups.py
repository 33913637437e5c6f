"""Parameter groups of a model, by the names and the depth of its parameters."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_thor.capture.patterns import selected


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float = 0.0,
    no_decay: str | Sequence[str] = (),
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """Return parameter groups of a model.

    For example: ``THOR(param_groups(model, weight_decay=0.01), model=model)``.

    Biases and all other parameters of one dimension are not decayed, and neither is what
    ``no_decay`` selects.

    Args:
        model: the model. Frozen parameters are left out.
        lr: the learning rate of the layers nearest to the loss; None leaves it to the optimizer,
            and stores the factor of ``layer_decay`` as ``lr_scale``, which timm's schedulers read.
        weight_decay: the weight decay of all other parameters.
        no_decay: names or patterns of ``fnmatch`` of parameters, or of modules that hold them.
        layer_decay: the factor of the learning rate from a block to the block before it (Clark et
            al. 2020, ELECTRA). Blocks are the children of numbered containers, as in
            ``"encoder.layer.3"``, and the other modules in front of and behind them, in the order
            of the model. 1: the same learning rate for all.

    Returns:
        Groups with ``params``, ``weight_decay``, and ``lr`` or ``lr_scale`` where they differ.

    Raises:
        ValueError: a pattern matches no parameter, or a number is out of range.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(
            f"layer_decay={layer_decay!r}: layer_decay must be in (0, 1]; 1 switches it off"
        )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    patterns = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    excluded = selected("no_decay", patterns, named, "parameter") if patterns else set()
    blocks = list(dict.fromkeys(_block(name) for name in named))
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        decays = parameter.dim() > 1 and name not in excluded
        depth = blocks.index(_block(name)) if layer_decay < 1 else len(blocks) - 1
        groups.setdefault((depth, decays), []).append(parameter)
    options = []
    for (depth, decays), members in groups.items():
        scale = layer_decay ** (len(blocks) - 1 - depth)
        rate = {"lr_scale": scale} if layer_decay < 1 else {}
        rate = rate if lr is None else {"lr": lr * scale}
        options.append({"params": members, "weight_decay": weight_decay if decays else 0.0, **rate})
    return options


def _block(name: str) -> str:
    """Return the block of a parameter: its name up to the first number, or its first module."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]
