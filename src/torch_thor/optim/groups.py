"""Parameter groups by name, and the coverage of an optimizer that a trainer has wrapped."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_thor.capture.coverage import Coverage
from torch_thor.capture.patterns import selected

if TYPE_CHECKING:
    from torch_thor.optim.base import CurvatureOptimizer


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
        layer_decay: the factor of the learning rate from one block to the one before it (Clark et
            al. 2020, ELECTRA). Blocks are the children of numbered containers, as in
            ``"encoder.layer.3"``, and the other modules in front of and behind them, in the order
            of the model. 1: the same learning rate for all.

    Returns:
        Groups with ``params``, ``weight_decay``, and ``lr`` or ``lr_scale`` where they differ.

    Raises:
        ValueError: a pattern matches no parameter, or a number is out of range.
    """
    if not weight_decay >= 0:
        raise ValueError(
            f"weight_decay={weight_decay!r}: weight_decay must be a number ≥ 0; 0 switches it off"
        )
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
    found = []
    for (depth, decays), members in groups.items():
        scale = layer_decay ** (len(blocks) - 1 - depth)
        rate = {"lr_scale": scale} if layer_decay < 1 else {}
        rate = rate if lr is None else {"lr": lr * scale}
        found.append({"params": members, "weight_decay": weight_decay if decays else 0.0, **rate})
    return found


def _block(name: str) -> str:
    """Return the block of a parameter: its name up to the first number, or its first module."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def coverage(optimizer: Any) -> Coverage:
    """List how each parameter of a model is trained, also if a trainer has wrapped the optimizer.

    Args:
        optimizer: THOR or ThorMuon; or what holds it: a wrapper or a trainer of Accelerate,
            Lightning, Hugging Face, fastai, Stable-Baselines3, DeepSpeed or torchtitan, a
            scheduler.

    Returns:
        One entry per parameter, in the model's order: its kind and factor sizes, or the reason why
        it has none. It prints as a table.

    Raises:
        TypeError: it neither is nor holds such an optimizer.
    """
    found = held(optimizer)
    if found is None:
        raise TypeError(
            f"coverage({type(optimizer).__name__}): must be THOR or ThorMuon, or what holds one as "
            f"its attribute optimizer; give the optimizer itself"
        )
    return found.coverage()


# attributes of wrappers
_HOLD = ("optimizer", "_optimizer", "base_optimizer", "opt", "optimizers", "policy")


def held(holder: Any) -> "CurvatureOptimizer | None":
    """Return THOR or ThorMuon from what holds it; None if there is none."""
    from torch_thor.optim.base import CurvatureOptimizer

    todo, seen = [holder], set[int]()
    while todo:
        one = todo.pop(0)
        if isinstance(one, CurvatureOptimizer):
            return one
        # a wrapper may answer every name with a new object
        if id(one) not in seen and len(seen) < 50:
            seen.add(id(one))
            inner = (getattr(one, name, None) for name in _HOLD)
            todo += (
                one
                if isinstance(one, list | tuple)
                else [part for part in inner if part is not None]
            )
    return None
