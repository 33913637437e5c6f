"""Muon for matrices, AdamW for the rest, as one optimizer.

`torch.optim.Muon` takes matrices alone. Here a convolution's weight is shown to it as the matrix
`weight.flatten(1)` (output channels x everything else); every parameter with fewer than two dimensions
(biases, norms) goes to `torch.optim.AdamW`. Both do their own arithmetic: this class only routes parameters
and state. Torch's Muon multiplies in bfloat16, which is slow on processors without such instructions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` behind one `param_groups` and one `state`.

    Args:
        params: A module, or parameters; those of two and more dimensions go to Muon.
        lr: Muon's learning rate.
        momentum: Muon's momentum.
        nesterov: Whether Muon's momentum is Nesterov's.
        weight_decay: Decoupled weight decay, for the matrices.
        adjust_lr_fn: Muon's rule for a matrix's step length; `match_rms_adamw` fits AdamW's learning rates.
        adamw_lr: AdamW's learning rate; `None` takes `lr`.
        adamw_embeddings: Whether the weights of `nn.Embedding` go to AdamW too, as Muon's author advises; this needs
            the module.

    Raises:
        ValueError: If `adamw_embeddings` is given and `params` is no module.
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
                raise ValueError("adamw_embeddings=True needs the module: pass it in the place of its parameters")
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
        return {
            **super().__getstate__(),
            "_inner": self._inner,
        }  # torch's keeps only what it knows: deepcopy needs both

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Computes the loss anew, as for any torch optimizer.

        Returns:
            What the closure returned, or `None` without one.
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
        matrices = [p.detach().flatten(1) for p in params]  # a view, but for layouts such as channels_last
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
