"""All optimizers of the studies, by name, and over what those of the suite are tuned."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import nanogpt_problem
from torch_thor import THOR, ThorMuon
from torch_thor.curvature import polar
from torch_thor.training.muon import MuonAdamW

NO_CURVATURE = 1e8  # a damping with which the inverse of A is a multiple of the identity
Make = Callable[..., torch.optim.Optimizer]
# learning rates that each optimizer is tried with, a factor of two apart; more if the best is an
# end
FEWEST_RATES = 6


@dataclass(frozen=True)
class Contender:
    """An optimizer.

    Args:
        lr: The middle of the three learning rates that are tried first.
        others: What is tried with the best learning rate: arguments of `make`; `factor` multiplies
            the learning rate. A momentum that is best is tried with the rates on both sides too.
        make: Makes the optimizer of a model from its learning rate and such arguments.
    """

    lr: float
    others: tuple[dict[str, float], ...]
    make: Make


def _momentum(value: float) -> tuple[dict[str, float], ...]:
    return {"momentum": value}, {"momentum": value, "factor": 2.0}


def _sgd(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=5e-4)


def _adamw(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(momentum, 0.99), weight_decay=0.01)


def _muon(
    model: nn.Module, lr: float, momentum: float = 0.95, adamw_share: float = 1.0
) -> torch.optim.Optimizer:
    # AdamW trains embeddings, biases and normalisation, as Muon's author recommends
    return MuonAdamW(
        model,
        lr=lr,
        momentum=momentum,
        adamw_lr=lr * adamw_share,
        weight_decay=0.01,
        adamw_embeddings=True,
    )


def _of_others(name: str) -> Make:
    def made(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        import pytorch_optimizer as others  # the extra `bench`

        optimizer: torch.optim.Optimizer = getattr(others, name)(model.parameters(), **options)
        return optimizer

    return made


def _soap(model: nn.Module, lr: float, momentum: float = 0.95) -> torch.optim.Optimizer:
    # the side of a vocabulary is left out, as by its authors
    rest = {"weight_decay": 0.01, "precondition_frequency": 10, "max_precondition_dim": 2000}
    return _of_others("SOAP")(model, lr=lr, betas=(momentum, 0.95), **rest)


def _kron(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    rest = {"weight_decay": 0.01, "max_size_triangular": 2000}
    return _of_others("Kron")(model, lr=lr, momentum=momentum, **rest)


def _schedule_free(model: nn.Module, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    made = _of_others("ScheduleFreeAdamW")
    return made(model, lr=lr, betas=(momentum, 0.99), weight_decay=0.01)


def _paper(model: nn.Module, lr: float, damping: float = 0.03) -> torch.optim.Optimizer:
    return THOR(model, lr=lr, weight_decay=5e-4, **THOR.preset("paper"), damping=damping)


def thor_muon(
    model: nn.Module, *, curvature: bool = True, products: bool = False, **options: Any
) -> ThorMuon:
    """Return ThorMuon, perhaps with the identity for A, or with polar factors by products."""
    if not curvature:
        options["damping"] = NO_CURVATURE
    kind = ByProducts if products else ThorMuon
    return kind(model, **{"weight_decay": 0.01, **options})


class ByProducts(ThorMuon):
    """ThorMuon with the polar factors of a GPU: six rounds of Polar Express in bfloat16."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        with mock.patch.object(polar, "_polar", _products):
            return super().step(closure)


def _products(parts: list[Tensor]) -> list[Tensor]:
    return [polar._by_products(polar._with_largest_entry_1(p), torch.bfloat16) for p in parts]


class NewtonMuon(MuonAdamW):
    """Newton-Muon (arXiv 2604.01472, algorithm 1), with the settings of its authors' second GPT.

    The layers are the linear layers that Muon trains, K is 0.001 I at first. In every 16th step
    K ← 0.8 K + 0.2 Z Zᵀ / N of the N inputs Z of a layer. From step 16 on a layer's gradient
    is multiplied by (K + 0.2 tr(K) / d I)⁻¹; then Muon takes its step.
    """

    INTERVAL = 16

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        matrices = {p for g in self.param_groups if g["algorithm"] == "muon" for p in g["params"]}
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        layers = [layer for layer in linear if layer.weight in matrices]
        self.steps, self.inverses = 0, dict[nn.Linear, Tensor]()
        self.second_moments = {layer: 1e-3 * torch.eye(layer.in_features) for layer in layers}
        for layer in layers:
            layer.register_forward_pre_hook(self._read)

    @property
    def _refreshes(self) -> bool:
        return (self.steps + 1) % self.INTERVAL == 0

    @torch.no_grad()
    def _read(self, layer: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        if self._refreshes and layer.training:
            rows = inputs[0].flatten(0, -2)
            self.second_moments[layer].lerp_(rows.T @ rows / len(rows), 0.2)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Multiply the gradients of the layers, then take Muon's step."""
        for layer, k in self.second_moments.items() if self._refreshes else ():
            ridge = 0.2 * k.trace() / len(k)
            factor = torch.linalg.cholesky(k + ridge * torch.eye(len(k)))
            self.inverses[layer] = torch.cholesky_inverse(factor)
        for layer, inverse in self.inverses.items():
            assert layer.weight.grad is not None
            layer.weight.grad = layer.weight.grad @ inverse
        self.steps += 1
        return super().step(closure)


def newton_muon(model: nn.Module, lr: float, momentum: float = 0.95) -> torch.optim.Optimizer:
    """Return Newton-Muon, with Muon's settings of the suite."""
    return NewtonMuon(
        model, lr=lr, momentum=momentum, adamw_lr=lr, weight_decay=0.01, adamw_embeddings=True
    )


PEERS = {
    "sgd": Contender(0.1, _momentum(0.8), _sgd),
    "adamw": Contender(0.004, _momentum(0.8), _adamw),
    "muon": Contender(0.02, (*_momentum(0.8), {"adamw_share": 0.25}, {"adamw_share": 4.0}), _muon),
    "soap": Contender(0.004, _momentum(0.8), _soap),
    "kron": Contender(0.002, _momentum(0.8), _kron),
    "schedule-free": Contender(0.004, _momentum(0.98), _schedule_free),
}
OURS = {
    "thor-muon": Contender(0.08, _momentum(0.9), thor_muon),
    "thor": Contender(0.1, _momentum(0.8), partial(THOR, weight_decay=5e-4)),
    "thor-paper": Contender(0.05, ({"damping": 0.1}, {"damping": 0.3}), _paper),
}
CLASSES = {"thor-muon": "ThorMuon", "thor": "THOR", "thor-paper": "THOR"}  # of ours
CONTENDERS = {**PEERS, **OURS}
WITHOUT_SCHEDULE = ("schedule-free",)
TRAINED = ("fine-tuning",)  # problems whose networks are trained already


def own_setting(task: str) -> dict[str, Any]:
    """Return ThorMuon's setting for all problems: its default, which is 0.08 for new networks."""
    return {"optimizer": "thor-muon"} if task in TRAINED else {"optimizer": "thor-muon", "lr": 0.08}


def _torch_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)


MAKERS: dict[str, Make] = {
    **{name: contender.make for name, contender in CONTENDERS.items()},
    "newton-muon": newton_muon,
    "torch-adamw": _torch_adamw,
    "nanogpt-adamw": nanogpt_problem.adamw,
    # without options: 0.0025 and the betas of schedule_free's README; Prodigy and DAdaptAdam
    "schedule-free at 0.0025": _of_others("ScheduleFreeAdamW"),
    "prodigy": _of_others("Prodigy"),
    "d-adaptation": _of_others("DAdaptAdam"),
}


def make(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Make an optimizer."""
    return MAKERS[name](model, **options)


def is_ours(name: str | None) -> list[str]:
    """Name the class of an optimizer, if it is ours."""
    return [CLASSES[name]] if name in CLASSES else []
