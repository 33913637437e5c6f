"""All optimizers of the studies, by name: each is made of a network and options."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.suite_optimizers import CONTENDERS, as_one_matrix
from torch_thor import ThorMuon
from torch_thor.curvature import polar
from torch_thor.training.muon import MuonAdamW

NO_CURVATURE = 1e8  # a damping with which the inverse of A is a multiple of the identity


def make(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Make an optimizer."""
    optimizer: torch.optim.Optimizer = MAKERS[name](model, **options)
    return optimizer


def is_ours(name: str) -> list[str]:
    """Name our class that an optimizer is, if it is one."""
    kinds = {"thor-muon": ThorMuon, "thor-muon by products": ThorMuon}
    return [kinds[name].__name__] if name in kinds else []


def thor_muon(model: nn.Module, **options: Any) -> ThorMuon:
    """Return ThorMuon; `curvature=False` takes the identity in the place of A."""
    if not options.pop("curvature", True):
        options["damping"] = NO_CURVATURE
    return ThorMuon(model, row_splits=as_one_matrix(model), **{"weight_decay": 0.01, **options})


def by_products(model: nn.Module, **options: Any) -> ThorMuon:
    """Return ThorMuon with the polar factors of a GPU: six rounds of Polar Express."""

    class ByProducts(ThorMuon):
        def step(self, closure: Any = None) -> Any:
            with _products():
                return super().step(closure)

    options = {"weight_decay": 0.01, **options}
    if not options.pop("curvature", True):
        options["damping"] = NO_CURVATURE
    return ByProducts(model, row_splits=as_one_matrix(model), **options)


@contextmanager
def _products() -> Iterator[None]:
    def rounds(parts: list[Tensor]) -> list[Tensor]:
        return [polar._by_products(polar._with_largest_entry_1(p), torch.bfloat16) for p in parts]

    with mock.patch.object(polar, "_polar", rounds):
        yield


class NewtonMuon(MuonAdamW):
    """Newton-Muon (arXiv 2604.01472), by its equations.

    Every 32nd step K ← 0.95 K + 0.05 Z Zᵀ / N of the N inputs Z of each linear layer; its gradient
    is multiplied by (K + 0.2 tr(K) / d I)⁻¹, then Muon takes its step.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.steps, self.layers = 0, [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.second_moments: dict[nn.Module, Tensor] = {}
        self.inverses: dict[nn.Module, Tensor] = {}
        for layer in self.layers:
            layer.register_forward_pre_hook(self._read)

    def _read(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self.steps % 32 or not layer.training:
            return
        rows = inputs[0].detach().flatten(0, -2)
        new = rows.T @ rows / len(rows)
        old = self.second_moments.get(layer)
        self.second_moments[layer] = new if old is None else old.lerp(new, 0.05)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Multiply the gradients of the layers, then take Muon's step."""
        for layer in self.layers:
            k = self.second_moments[layer]
            if self.steps % 32 == 0:
                ridge = 0.2 * k.trace() / len(k)
                factor = torch.linalg.cholesky(k + ridge * torch.eye(len(k)))
                self.inverses[layer] = torch.cholesky_inverse(factor)
            assert layer.weight.grad is not None
            layer.weight.grad = layer.weight.grad @ self.inverses[layer]
        self.steps += 1
        return super().step(closure)


def newton_muon(model: nn.Module, lr: float, momentum: float = 0.95) -> torch.optim.Optimizer:
    """Return Newton-Muon, with Muon's settings of the suite."""
    return NewtonMuon(
        model, lr=lr, momentum=momentum, adamw_lr=lr, weight_decay=0.01, adamw_embeddings=True
    )


MAKERS: dict[str, Callable[..., Any]] = {
    **{name: contender.make for name, contender in CONTENDERS.items()},
    "thor-muon": thor_muon,
    "thor-muon by products": by_products,
    "newton-muon": newton_muon,
}
