"""THOR and ThorMuon for linear layers, to read; those to train with are in :mod:`torch_thor`.

Left out: default options; other layers; inputs other than ``(N, ..., d_in)``; losses other than the
mean over N; several passes in a step; growing intervals; samples of large batches; failures.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Reference:
    """What both have: options, what layers see, inverses of blocks, and the bound on a step."""

    model: nn.Module
    lr: float
    damping: float  # λ
    momentum: float  # μ
    nesterov: bool
    weight_decay: float
    update_interval: int  # steps from one refresh to the next
    split_dim: int | None
    factor_decay: float  # weight of the factors in use in the running average
    max_update_ratio: float | None  # r

    def __post_init__(self) -> None:
        self.steps = 0
        self.layers = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        self.inputs = dict[nn.Module, Tensor]()  # of the latest pass, (N, ..., d_in)
        self.gradients = dict[nn.Module, Tensor]()  # of the outputs, (N, ..., d_out)
        self.factors = dict[nn.Module, list[Tensor]]()  # in use: A and G; ThorMuon has only A
        self.inverses = dict[nn.Module, list[Tensor]]()
        self.T = dict[nn.Module, float]()  # rows per loss term when the factors were taken
        self.stopped = dict[nn.Module, bool]()
        self.v: dict[Tensor, Tensor] = {W: torch.zeros_like(W) for W in self.model.parameters()}
        for layer in self.layers:
            layer.register_forward_hook(self.observe)

    def observe(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the input of a layer, and the gradient of its output when that is known."""
        if output.requires_grad:
            self.inputs[layer] = inputs[0].detach()
            output.register_hook(lambda gradient: self.gradients.update({layer: gradient}))

    def inverse(self, factor: Tensor, damping: float) -> Tensor:
        """Return ``(F + damping · I)⁻¹``, where F is cut into diagonal blocks (section 3.3)."""
        block = torch.arange(len(factor)) // (self.split_dim or len(factor))
        factor = factor.where(block == block[:, None], 0.0)
        return (factor + damping * torch.eye(len(factor), dtype=factor.dtype)).inverse()

    def bounded(self, d: Tensor, lr: float, weight: Tensor) -> Tensor:
        """Shorten d so that ``lr ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)``."""
        longest_step = max(float(weight.norm()), 0.03 * math.sqrt(len(weight)))
        longest_step *= self.max_update_ratio or math.inf
        return d * torch.clamp(longest_step / (lr * d.norm()), max=1.0)


@dataclass
class ReferenceTHOR(Reference):
    """``d = (1/T) · (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹``, then decay, bound and momentum."""

    trace_thresholds: tuple[float, float]  # ω1, ω2
    kl_clip: float | None  # κ, in the place of r

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, after the backward pass."""
        directions = dict[nn.Parameter, Tensor]()
        divergence = 0.0  # Σ lr² ⟨d, ∇W⟩
        for layer in self.layers:
            if self.steps % self.update_interval == 0 and not self.stopped.get(layer):
                self.refresh(layer)
            A_inverse, G_inverse = self.inverses[layer]
            for parameter in layer.parameters():
                assert parameter.grad is not None
                d = G_inverse @ parameter.grad / self.T[layer]
                if parameter is layer.weight:  # a bias has the constant input 1, so its A is 1
                    d = d @ A_inverse
                directions[parameter] = d = d + self.weight_decay * parameter
                divergence += self.lr**2 * float((d * parameter.grad).sum())
        clip = math.sqrt(self.kl_clip / max(self.kl_clip, divergence)) if self.kl_clip else None
        for parameter, d in directions.items():
            d = self.bounded(d, self.lr, parameter) if clip is None else clip * d
            self.v[parameter] = v = self.momentum * self.v[parameter] + d
            parameter.sub_(self.lr * (d + self.momentum * v if self.nesterov else v))
        self.steps += 1

    def refresh(self, layer: nn.Module) -> None:
        """Take new factors and invert them, unless the trace rule (section 3.2) keeps the old."""
        a = self.inputs[layer].flatten(0, -2)
        g = self.gradients[layer].flatten(0, -2) * len(self.inputs[layer])  # N: of one loss term
        T = len(a) / len(self.inputs[layer])
        A = a.T @ a / len(a)
        G = g.T @ g / len(g)
        if layer in self.factors:
            old_A, old_G = self.factors[layer]
            added = self.damping * len(A) * len(G)  # tr(λI)
            before = self.T[layer] * float(old_A.trace() * old_G.trace()) + added
            change = abs(T * float(A.trace() * G.trace()) + added - before) / before
            self.stopped[layer] = change < self.trace_thresholds[1]
            if change <= self.trace_thresholds[0]:
                return
            A = A.lerp(old_A, self.factor_decay)
            G = G.lerp(old_G, self.factor_decay)
        self.T[layer] = T
        self.factors[layer] = [A, G]
        self.inverses[layer] = [self.inverse(F, math.sqrt(self.damping / T)) for F in (A, G)]


def orthogonal(matrix: Tensor, split_dim: int | None) -> Tensor:
    """Return the polar factors ``U Vᵀ`` of the blocks along the shorter side."""
    if len(matrix) > len(matrix.T):
        return orthogonal(matrix.T, split_dim).T
    polars = []
    for block in matrix.split(split_dim or len(matrix)):
        U, values, Vt = torch.linalg.svd(block, full_matrices=False)
        polars.append(U * (values > 1e-9 * values.max()) @ Vt)  # a value of 0 has no direction
    return torch.cat(polars)


@dataclass
class ReferenceThorMuon(Reference):
    """``u = ∇W + μ v``, ``d = orth(u (A + λ tr(A)/d_in · I)⁻¹)``; AdamW trains the biases."""

    anytime: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.squares = 0.0  # Σ lr²
        self.z, self.x = ({W: W.detach().clone() for W in self.model.parameters()} for _ in "zx")
        biases = {"params": [layer.bias for layer in self.layers if layer.bias is not None]}
        self.adamw = torch.optim.AdamW([biases], 0.2 * self.lr, (0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, after the backward pass."""
        for parameter in self.model.parameters():
            if self.anytime:  # gradients are taken at y, and z takes the step
                parameter.copy_(self.z[parameter])
            parameter.mul_(1 - self.lr * self.weight_decay)
        self.adamw.step()
        lr = self.lr * math.sqrt(min(1.0, 10 / len(self.layers)))  # less in deep networks
        for layer in self.layers:
            if self.steps % self.update_interval == 0:
                self.refresh(layer)
            W = layer.weight
            assert W.grad is not None
            self.v[W] = v = self.momentum * self.v[W] + W.grad
            u = W.grad + self.momentum * v if self.nesterov else v
            d = orthogonal(u @ self.inverses[layer][0], self.split_dim)
            d *= math.sqrt(min(W.shape) * max(1, len(W) / len(W.T))) / d.norm()
            W.sub_(lr * self.bounded(d, lr, W))
        self.steps += 1
        self.squares += self.lr**2
        for W in self.model.parameters() if self.anytime else ():
            self.z[W].copy_(W)
            self.x[W].lerp_(W, self.lr**2 / self.squares)  # x ← x + c (z - x)
            beta = 1 - 0.2 * min(1, 100 / self.steps) ** 0.3
            W.lerp_(self.x[W], beta)  # y = (1 - β) z + β x

    def refresh(self, layer: nn.Module) -> None:
        """Take a new A and invert it."""
        a = self.inputs[layer].flatten(0, -2)
        A = a.T @ a / len(a)
        for old in self.factors.get(layer, []):
            A = A.lerp(old, self.factor_decay)
        self.factors[layer] = [A]
        self.inverses[layer] = [self.inverse(A, self.damping * float(A.trace()) / len(A))]
