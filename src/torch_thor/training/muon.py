"""Muon for matrices and AdamW for all other parameters, as one optimizer.

`torch.optim.Muon` accepts matrices only. Here the weight of a convolution is passed to it as the
matrix `weight.flatten(1)` (output channels x all other dimensions). Parameters with fewer than two
dimensions (biases, parameters of normalisation layers) are passed to `torch.optim.AdamW`. This
class only distributes parameters and state: torch's optimizers compute the steps. Torch's Muon
multiplies in bfloat16, which is slow on processors without bfloat16 instructions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` with common `param_groups` and a common `state`.

    Args:
        params: A module, parameters, or parameter groups. Muon trains those of two or more
            dimensions, AdamW the others.
        lr: Learning rate of Muon.
        momentum: Momentum factor of Muon.
        nesterov: Whether Muon uses Nesterov momentum.
        weight_decay: Decoupled weight decay of the parameters that Muon trains. The others have no
            weight decay.
        adjust_lr_fn: Muon's rule that scales the learning rate by the shape of a matrix. With
            `match_rms_adamw`, learning rates of AdamW can be used.
        adamw_lr: Learning rate of AdamW; `None` stands for `lr`.
        adamw_embeddings: Whether AdamW also trains the weights of `nn.Embedding`, as Muon's author
            recommends.
        model: The module, which `adamw_embeddings` needs where `params` are parameters.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | None = None,
        adamw_embeddings: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            model, params = params, params.parameters()
        embeddings = {
            module.weight
            for module in (model.modules() if model is not None and adamw_embeddings else ())
            if isinstance(module, nn.Embedding)
        }
        given: list[Any] = list(params)
        self._inner: dict[str, torch.optim.Optimizer] = {}
        groups: list[dict[str, Any]] = []
        for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
            halves: dict[str, list[Tensor]] = {"muon": [], "adamw": []}
            for p in group["params"]:
                halves["muon" if p.ndim >= 2 and p not in embeddings else "adamw"].append(p)
            its: dict[str, Any] = {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                **{key: value for key, value in group.items() if key != "params"},
            }
            if matrices := halves["muon"]:
                flat = [p.detach().flatten(1) for p in matrices]
                self._inner["muon"] = torch.optim.Muon(flat, **its, adjust_lr_fn=adjust_lr_fn)
                groups.append(
                    {**self._inner["muon"].param_groups[0], "params": matrices, "algorithm": "muon"}
                )
            if rest := halves["adamw"]:
                self._inner["adamw"] = torch.optim.AdamW(
                    rest, lr=its["lr"] if adamw_lr is None else adamw_lr, weight_decay=0.0
                )
                groups.append({**self._inner["adamw"].param_groups[0], "algorithm": "adamw"})
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; first call a closure, with gradients enabled, and return its result."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            inner = self._inner[group["algorithm"]]
            if group["algorithm"] == "adamw":
                inner.param_groups, inner.state = [group], self.state
                inner.step()
                continue
            params = [p for p in group["params"] if p.grad is not None]
            # For channels_last weights they are copies, and no views.
            matrices = [p.detach().flatten(1) for p in params]
            for p, matrix in zip(params, matrices, strict=True):
                matrix.grad = p.grad.flatten(1)
            inner.param_groups = [{**group, "params": matrices}]
            inner.state.clear()
            inner.state.update(
                {matrix: self.state[p] for p, matrix in zip(params, matrices, strict=True)}
            )
            inner.step()
            for p, matrix in zip(params, matrices, strict=True):
                if not p.is_contiguous():
                    p.copy_(matrix.view(p.shape))
        return loss
