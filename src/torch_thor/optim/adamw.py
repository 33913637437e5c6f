"""The step of AdamW that the scale-free update rule takes for parameters that are not matrices."""

from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from torch_thor.curvature.row_shards import local

# The learning rate of AdamW as a share of lr, and its other options.
ADAMW_SHARE = 0.2
ADAMW_BETAS = (0.9, 0.95)
_ADAMW_EPS = 1e-8


def adamw_step_(others: list[tuple[Tensor, Tensor, dict[str, Any]]], lr: float) -> None:
    """Take a step of AdamW with ``ADAMW_SHARE`` of the learning rate, without weight decay."""
    parameters: list[Tensor] = []
    gradients, averages, squares, steps = [], [], [], []
    alike = on_cpu = True
    is_complex = False
    for parameter, gradient, state in others:
        parameters.append(parameter)
        gradients.append(gradient)
        averages.append(local(state["exp_avg"]))
        squares.append(local(state["exp_avg_sq"]))
        steps.append(state["step"])
        alike = alike and parameter.dtype == gradient.dtype
        on_cpu = on_cpu and parameter.device.type == "cpu"
        is_complex = is_complex or parameter.is_complex()
    adamw(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        # torch's batched kernels require parameters and state of one dtype; for bfloat16 parameters state is float32
        foreach=None if alike else False,
        fused=(alike and on_cpu and not is_complex) or None,
        has_complex=is_complex,
        amsgrad=False,
        beta1=ADAMW_BETAS[0],
        beta2=ADAMW_BETAS[1],
        lr=lr * ADAMW_SHARE,
        weight_decay=0.0,
        eps=_ADAMW_EPS,
        maximize=False,
    )
