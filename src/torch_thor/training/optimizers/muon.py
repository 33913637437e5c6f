"""Muon for matrices and AdamW for all other parameters, as one optimizer.

`torch.optim.Muon` accepts matrices only. Here the weight of a convolution is passed to it as the matrix
`weight.flatten(1)` (output channels x all other dimensions). Parameters with fewer than two dimensions (biases,
parameters of normalisation layers) are passed to `torch.optim.AdamW`. This class only distributes parameters and state:
torch's optimizers compute the steps. Torch's Muon multiplies in bfloat16, which is slow on processors without bfloat16
instructions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` with common `param_groups` and a common `state`.

    Args:
        params: A module, or parameters. Muon trains those of two or more dimensions, AdamW the others.
        lr: Learning rate of Muon.
        momentum: Momentum factor of Muon.
        nesterov: Whether Muon uses Nesterov momentum.
        weight_decay: Decoupled weight decay of the parameters that Muon trains. The others have no weight decay.
        adjust_lr_fn: Muon's rule that scales the learning rate by the shape of a matrix. With `match_rms_adamw`,
            learning rates of AdamW can be used.
        adamw_lr: Learning rate of AdamW; `None` stands for `lr`.
        adamw_embeddings: Whether AdamW also trains the weights of `nn.Embedding`, as Muon's author recommends.

    Raises:
        ValueError: If `adamw_embeddings` is True and `params` is not a module.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | None = None,
        adamw_embeddings: bool = False,
    ) -> None:
        embeddings: set[Tensor] = set()
        if adamw_embeddings:
            if not isinstance(params, nn.Module):
                raise ValueError("adamw_embeddings=True needs the module: pass it instead of its parameters")
            embeddings = {module.weight for module in params.modules() if isinstance(module, nn.Embedding)}
        params = list(params.parameters() if isinstance(params, nn.Module) else params)
        matrices = [p for p in params if p.ndim >= 2 and p not in embeddings]
        rest = [p for p in params if p.ndim < 2 or p in embeddings]
        groups: list[dict[str, Any]] = []
        self._inner: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self._inner["muon"] = torch.optim.Muon(
                [p.detach().flatten(1) for p in matrices],
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                adjust_lr_fn=adjust_lr_fn,
            )
            groups.append({**self._inner["muon"].param_groups[0], "params": matrices, "algorithm": "muon"})
        if rest:
            adamw_lr = lr if adamw_lr is None else adamw_lr
            self._inner["adamw"] = torch.optim.AdamW(rest, lr=adamw_lr, weight_decay=0.0)
            groups.append({**self._inner["adamw"].param_groups[0], "algorithm": "adamw"})
        super().__init__(groups, {})

    def __getstate__(self) -> dict[str, Any]:
        # torch's method returns only its own attributes, and a deep copy needs the inner optimizers too
        return {**super().__getstate__(), "_inner": self._inner}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A function that recomputes the loss, as for any torch optimizer.

        Returns:
            The loss that the closure returned, or `None` without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._muon_step(group)
            else:
                inner = self._inner["adamw"]
                inner.param_groups, inner.state = [group], self.state
                inner.step()
        return loss

    @torch.no_grad()
    def _muon_step(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        matrices = [p.detach().flatten(1) for p in params]  # copies, not views, for channels_last weights
        for p, matrix in zip(params, matrices, strict=True):
            matrix.grad = p.grad.flatten(1)
        inner = self._inner["muon"]
        inner.param_groups = [{**group, "params": matrices}]
        inner.state.clear()
        inner.state.update({matrix: self.state[p] for p, matrix in zip(params, matrices, strict=True)})
        inner.step()
        for p, matrix in zip(params, matrices, strict=True):
            if matrix.data_ptr() != p.data_ptr():
                p.copy_(matrix.view(p.shape))
