"""Loss terms and padding from what a model is called with."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.optim.base import CurvatureOptimizer

IGNORED = -100  # the label of tokens that the losses of transformers leave out


def follow_labels(optimizer: CurvatureOptimizer) -> Callable[[], None]:
    """Set ``loss_terms`` and ``row_mask`` on refreshes from the arguments of the model's call.

    The model must take the keyword arguments of transformers. ``row_mask`` is ``attention_mask``
    (N, L). ``loss_terms`` is the number of ``labels`` of this process that are not -100, in all
    forward passes since the last step. The loss of a causal language model of transformers has no
    term for the first label of a sequence.

    Args:
        optimizer: THOR; or ThorMuon, which needs the padding only.

    Returns:
        A function that ends it.
    """
    shifts = getattr(optimizer.model, "loss_type", "") in (None, "ForCausalLM")
    counted = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: nn.Module, args: Any, given: Mapping[str, Any]) -> None:
        nonlocal counted
        if not torch.is_grad_enabled() or not any(
            layer.due and layer.weight.requires_grad for layer in optimizer.curvature.values()
        ):
            return
        mask, labels = given.get("attention_mask"), given.get("labels")
        optimizer.row_mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if isinstance(labels, Tensor) and optimizer.form.has_g:
            targets = labels[:, 1:] if shifts and labels.dim() == 2 else labels
            counted += int(targets.ne(IGNORED).sum())
        optimizer.loss_terms = counted or None

    def after(*_: Any) -> None:
        nonlocal counted
        counted = 0

    handles = (
        optimizer.model.register_forward_pre_hook(before, with_kwargs=True),
        optimizer.register_step_post_hook(after),
    )

    def end() -> None:
        for handle in handles:
            handle.remove()
        optimizer.row_mask = optimizer.loss_terms = None

    return end
