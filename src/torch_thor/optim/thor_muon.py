"""ThorMuon: Muon's orthogonalised step, preconditioned with THOR's curvature of the inputs."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.coverage import Coverage
from torch_thor.capture.patterns import Patterns
from torch_thor.curvature.blocks import factor_dtype
from torch_thor.curvature.communication import SINGLE_PROCESS
from torch_thor.distributed.options import Distributed
from torch_thor.intervals import Geometric, UpdateInterval
from torch_thor.optim.averaging import averaged, show
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.batches import Binding, momentum_, shrink_, with_gradients
from torch_thor.optim.model_argument import Group
from torch_thor.optim.orthogonal import (
    adamw_,
    batches_of,
    dense_gradients,
    matrices_of,
    preconditioned,
    subtract_orthogonal_,
)
from torch_thor.optim.plan import Form
from torch_thor.optim.projections import RowSplits

_USUAL_DEPTH = 10  # matrices; the learning rate of networks with more of them is reduced
_ADAMW_SHARE = 0.2  # the learning rate of AdamW as a share of lr
_LONG = 300  # steps after which a learning rate is expected to have changed
_CONSTANT = (
    f"lr has not changed in {_LONG} steps. Let a scheduler of torch lower it to 0 by the end of "
    "the training, or give anytime=True, which needs no schedule"
)


class ThorMuon(CurvatureOptimizer):
    """Momentum, preconditioned with a layer's second moment A, orthogonalised, at a fixed length.

    A is the second moment of the layer's input.

    For a matrix W (``d_out × d_in``): ``v ← μ v + ∇W``, ``u = ∇W + μ v``,
    ``d = orth(u (A + λ tr(A)/d_in · I)⁻¹)`` with
    ``‖d‖_F = √min(d_out, d_in) · √max(1, d_out / d_in)``, and
    ``W ← (1 − lr · weight_decay) W − lr · √min(1, 10 / L) · d`` for L trained matrices (η ∝
    1/√depth, HyperP, arXiv 2603.28743). The step does not depend on the scale of the loss or the
    width of the layer, so one lr serves all layers and tasks. ``orth`` returns polar factors of
    blocks of ``split_dim`` rows (``torch_thor.curvature.polar``). A matrix without factors, as of a
    layer that is not known, takes the same step with the identity in the place of A. What is no
    matrix (biases, parameters of normalisation layers, embeddings) and layers that ``layers``
    leaves out are trained with AdamW at ``0.2 lr`` and betas (0.9, 0.95). ``coverage`` lists the
    treatment of each parameter. Where it is created and what may be set before ``step``: as for
    ``torch_thor.THOR``.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``.
        lr: learning rate: the spectral norm of the step of a square matrix. None: 0.08, or 0.12
            with ``anytime``, which the groups hold, and less where the first step finds that the
            network is trained already: a matrix whose entries are dependent then takes 0.125 of it,
            a matrix that does not tell (zeros, one sign, equal rows or columns) 0.25, what
            is no matrix 0.0125 (docs/explanation/thor-muon.md). The network is trained if frozen or
            quantised weights hold more numbers than the trained matrices, or if these tell so.
            ``group["trained"]`` holds the answer, ``state[p]["lr_factor"]`` the shares, and
            ``print(optimizer)`` says them. A learning rate that is given counts as it is, also in
            a single group; ``learning_rate`` of a Trainer's arguments is not given to the
            optimizer.
        damping: λ, relative to the mean diagonal of A. Every parameter group holds it.
        momentum: μ in [0, 1).
        nesterov: ``u = ∇W + μ v`` instead of ``u = v``.
        weight_decay: decoupled: ``W ← (1 − lr · weight_decay) W``. To set it for some parameters:
            ``torch_thor.param_groups``.
        update_interval: as for ``torch_thor.THOR``; by default every step at first and every 50th
            from step 139 on.
        split_dim: block size of A, and the number of rows that are orthogonalised together; None
            for whole matrices.
        factor_decay: weight of the old A in a running average.
        max_update_ratio: r; the step of each matrix is at most ``r · max(‖W‖_F, 0.03 √d_out)``
            long, of each group of a convolution and each expert on its own. None: no bound. Weights
            that are small on purpose (SIREN): 0.05.
        model: the model, where ``params`` are parameters.
        layers: the layers whose A is used, as for ``torch_thor.THOR``; all other matrices of known
            layers are trained with AdamW. None: all.
        row_splits: layers that compute several projections at once, which are orthogonalised apart:
            from patterns of their names to the number of equal projections, or the sizes of each,
            as in ``{"*.qkv": 3}`` or ``{"*.qkv": (768, 128, 128)}``; 1 for one matrix. Those of
            ``torch.nn.MultiheadAttention``, of the attention of GPT-2, GPT-NeoX and Bloom in
            transformers and of timm are known.
        anytime: train without a schedule, to stop or to go on at any time: the steps are averaged
            (docs/explanation/thor-muon.md), at 4 bytes for each parameter. The parameters can be
            evaluated and saved as they are; ``eval`` shows the average itself, which is better, and
            ``train`` goes on, as with schedule_free.
        distributed: how to train with other processes; None: with those of the default group, if
            there is one.

    Raises:
        ValueError: an option is out of range, a parameter is not the model's, a pattern matches no
            layer, or nothing is trained.
        TypeError: ``params`` are parameters and ``model`` is missing.
    """

    form = Form(
        "AdamW",
        matrix="orthogonalised momentum",
        factor_names=("A",),
        relative_damping=True,
        orthogonalises=True,
    )
    usual_lr = 0.08
    _rates: list[float] | None = None  # of the groups, in the first step
    row_splits = property(
        attrgetter("_curvature.form.row_splits"),
        doc="The layers that compute several projections at once, as they were given.",
    )

    def _update(self, binding: Binding) -> None:
        """Take the step of every parameter with a gradient."""
        if binding.groups[0]["step"] in (0, _LONG):
            self._compare_rates(binding)
        of_depth = math.sqrt(min(1.0, _USUAL_DEPTH / max(1, binding.depth)))
        whole_matrices = self.distributed.whole_matrices
        shards = binding.plan.first_shards if whole_matrices else None
        processes = self._curvature.processes if binding.plan.sharded else SINGLE_PROCESS
        batches = binding.batches(
            partial(batches_of, whole_matrices=whole_matrices, anytime=self.anytime)
        )
        for batch in (averaged if self.anytime else with_gradients)(batches):
            # of the group, and less where the weights were trained already
            lr = float(batch.group["lr"]) * batch.lr_factor
            gradients = dense_gradients(batch)
            # W ← (1 - lr · weight_decay) W
            shrink_(batch.weights, lr * float(batch.group["weight_decay"]))
            if not batch.stacks:
                adamw_(batch, gradients, lr * _ADAMW_SHARE)
                continue
            u = momentum_(batch, gradients)  # v ← μ v + ∇W;  u = ∇W + μ v  (or u = v)
            wide = preconditioned(batch, u)  # u (A + λ tr(A)/d_in · I)⁻¹
            # d = orth(·);  ‖d‖ = √min(d_out, d_in) · √max(1, d_out / d_in), within r · ‖W‖ / lr;
            # W ← W - lr · √min(1, 10 / L) · d
            subtract_orthogonal_(batch, wide, lr * of_depth, shards, processes)

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor | None = None,
        damping: float | Tensor = 0.1,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        update_interval: UpdateInterval = Geometric(1, 50, factor=1.5),  # noqa: B008  # immutable
        split_dim: int | None = 128,
        factor_decay: float = 0.5,
        max_update_ratio: float | None = 0.15,
        model: nn.Module | None = None,
        layers: Patterns = None,
        row_splits: RowSplits = None,
        anytime: bool = False,
        distributed: Distributed | None = None,
    ) -> None:
        self.anytime = anytime
        if anytime:
            self.usual_lr = 0.12
        super().__init__(params, model, locals() | {"lr_squares": 0.0, "shows_average": False})
        if anytime:
            self.register_step_pre_hook(_refuse_average)

    def eval(self) -> None:
        """Put the average of the steps into the parameters, for an evaluation or a checkpoint.

        Without ``anytime`` both ``eval`` and ``train`` do nothing.
        """
        if self.anytime:
            show(self.param_groups, self.state, average=True)

    def train(self) -> None:
        """Put the weights at which gradients are taken back into the parameters, after ``eval``."""
        if self.anytime:
            show(self.param_groups, self.state, average=False)

    def _compare_rates(self, binding: Binding) -> None:
        """Warn of learning rates that are those of the first step."""
        rates = [float(group["lr"]) for group in binding.groups]
        if rates == self._rates and not self.anytime:
            self._curvature.warnings.note(_CONSTANT)
        self._rates = rates

    def coverage(self) -> Coverage:
        """List how each parameter of the model is trained.

        Returns:
            One entry per parameter, in the model's order: its kind, the size of A or the reason why
            it has none, and the shapes of the matrices that are orthogonalised. It prints as a
            table.
        """
        entries, parameters = super().coverage(), dict(self.model.named_parameters())
        binding = self._binding()
        return Coverage(
            replace(entry, matrices=matrices_of(parameters[entry.name], binding))
            if entry.trained
            else entry
            for entry in entries
        )

    def _make_parameter_state(
        self, binding: Binding, parameter: Tensor, state: dict[str, Any], group: Group
    ) -> None:
        is_matrix = binding.is_matrix(parameter)
        if not is_matrix:
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        dtype = factor_dtype(parameter.dtype)
        # as torch.optim.AdamW has them
        for key in ("momentum_buffer",) if is_matrix else ("exp_avg", "exp_avg_sq"):
            state.setdefault(key, torch.zeros_like(parameter, dtype=dtype))
        for key in ("z",) if dtype == parameter.dtype else ("z", "x"):
            if self.anytime:
                state.setdefault(key, parameter.detach().to(dtype, copy=True))
            else:
                state.pop(key, None)  # of a run with the average


def _refuse_average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if any(group["shows_average"] for group in optimizer.param_groups):
        raise RuntimeError(
            "the parameters hold the average of the steps, because optimizer.eval() was called: "
            "call optimizer.train() before the next forward pass"
        )
