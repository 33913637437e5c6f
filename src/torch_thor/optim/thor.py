"""THOR: the trace-based, layer-wise natural-gradient optimizer, for any PyTorch model.

It follows Chen et al., AAAI 2021.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.patterns import Patterns
from torch_thor.capture.sampling import Predicts
from torch_thor.curvature.blocks import factor_dtype
from torch_thor.curvature.communication import SINGLE_PROCESS
from torch_thor.distributed.options import Distributed
from torch_thor.intervals import UpdateInterval
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.batches import Binding, subtract_
from torch_thor.optim.model_argument import Group
from torch_thor.optim.natural import batches_of, natural_gradients
from torch_thor.optim.update import (
    with_decay,
    with_momentum,
    within_kl_clip,
    within_ratio,
)

# "paper" is the step of the paper, without a bound; the others are the three settings of (ω1, ω2)
# in the paper.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"trace_thresholds": (0.01, 0.0), "kl_clip": None, "max_update_ratio": None},
    "thor": {"trace_thresholds": (0.01, 0.0)},
    "thor_stop": {"trace_thresholds": (0.01, 0.001)},
    "thor_nt": {"trace_thresholds": (0.0, 0.0)},
}


class THOR(CurvatureOptimizer):
    """Natural gradient with Kronecker factors, refreshed layer by layer when their trace changed.

    For linear layers, convolutions (1d to 3d, transposed, grouped), embeddings, attention,
    recurrent layers and experts: ``ΔW = (1/T) · (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` with the
    empirical Fisher's factors A (input) and G (output gradient of one loss term); biases are solved
    with G only. Then weight decay (``+ weight_decay · W``), the bound on the step, and momentum as
    in ``torch.optim.SGD`` are applied. All other parameters, including those of normalisation
    layers, are trained by SGD with momentum under the same bound; ``coverage`` lists the treatment
    of each parameter. Neither the model nor the training loop has to be changed.

    Create the optimizer after ``fully_shard`` (FSDP2, HSDP), which replaces the parameters, and
    before ``DistributedDataParallel``. ``torch.compile`` may come before or after; steps that
    gather statistics run eagerly, all others compiled. The attributes ``loss_terms``, ``row_mask``
    and ``grad_scaler`` may be set any time before ``step``.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``.
        lr: learning rate, a float or a one-element tensor. The length of a natural-gradient step
            depends on lr and damping together, so a learning rate of SGD does not transfer. None:
            0.05, and less where the first step finds that the network is trained already, as for
            ``torch_thor.ThorMuon``. A learning rate that is given counts as it is.
        damping: λ > 0; ``√(λ/T)`` is added to the diagonal of both factors. Schedule it like lr:
            every parameter group holds it. Inverses have the damping of the refresh that made them.
        momentum: μ in [0, 1).
        nesterov: step along ``d + μ v`` instead of ``v``.
        weight_decay: added to the natural gradient as ``weight_decay · W`` (so it is not
            preconditioned). To set it for some parameters: ``torch_thor.param_groups``.
        update_interval: steps between refreshes; or a schedule of ``torch_thor.intervals`` or any
            callable, from the step of a refresh (counted from 0) to the number of steps until the
            next. The first step refreshes. The option may be changed in each parameter group and is
            read at the next refresh.
        trace_thresholds: ``(ω1, ω2)``, section 3.2 of the paper: on a refresh, a layer whose trace
            changed by more than ω1 takes new factors; by less than ω2, it stops for good; otherwise
            it keeps its factors. ``(0, 0)`` always takes new factors.
        split_dim: block size of the factors (section 3.3), None for full factors;
            ``choose_split_dim(model, batch).split_dim`` measures one for this model and device.
        factor_decay: weight of the old factors in a running average; 0, as in the paper, uses the
            latest only.
        max_update_ratio: r; the step ``lr · d`` of a parameter, before momentum, is at most r times
            as long as the parameter: ``lr · ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)``, where d_out is its
            first size that is not 1. None: no bound, as in the paper. Under FSDP2 it bounds the
            rows of each process on their own.
        kl_clip: κ; scales the step of the preconditioned layers by ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))``
            (Ba et al. 2017), in the place of ``max_update_ratio``, which is then not applied. None:
            not used.
        model: the model, where ``params`` are parameters.
        layers: the layers to precondition; SGD with momentum trains all others. Names or patterns
            of ``fnmatch``, where the name of a module stands for every layer inside it and a
            leading minus excludes (``"-head"``), or a callable ``(name, module) -> bool``. None:
            all.
        loss_reduction: ``"mean"`` if the loss is the mean over the loss terms of the mini-batch,
            ``"sum"`` if it is their sum.
        fisher: the labels that the statistics use. ``"empirical"``: those of the training loss.
            ``"sampled"``: labels drawn from the model's own predictions, which ``sample_fisher``
            needs after each forward pass.
        distributed: how to train with other processes; None: with those of the default group, if
            there is one.

    Raises:
        ValueError: an option is out of range, a parameter is not the model's, a pattern matches no
            layer, or nothing can be preconditioned.
        TypeError: ``params`` are parameters and ``model`` is missing.
    """

    usual_lr = 0.05

    def _update(self, binding: Binding) -> None:
        """Take the step of every parameter with a gradient."""
        processes = self._curvature.processes if binding.plan.sharded else SINGLE_PROCESS
        batches = binding.batches(batches_of)
        # d = (1/T) (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹; ∇W without factors
        directions = natural_gradients(batches)
        directions = with_decay(directions)  # d ← d + weight_decay · W
        directions = within_kl_clip(directions, binding, processes)  # Σ lr² ⟨d, ∇W⟩ ≤ κ
        directions = within_ratio(directions)  # lr ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)
        directions = with_momentum(directions)  # v ← μ v + d,  d ← v  (Nesterov: d ← d + μ v)
        for batch, d in directions:
            # W ← W - lr · d, and less where the weights were trained already
            subtract_(batch.weights, d, float(batch.group["lr"]) * batch.lr_factor)

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor | None = None,
        damping: float | Tensor = 0.03,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        update_interval: UpdateInterval = 100,
        trace_thresholds: tuple[float, float] = (0.01, 0.0),
        split_dim: int | None = 128,
        factor_decay: float = 0.0,
        max_update_ratio: float | None = 0.01,
        kl_clip: float | None = None,
        model: nn.Module | None = None,
        layers: Patterns = None,
        loss_reduction: str = "mean",
        fisher: str = "empirical",
        distributed: Distributed | None = None,
    ) -> None:
        super().__init__(params, model, locals())

    @staticmethod
    def preset(name: str) -> dict[str, Any]:
        """Return the options of a named setting: ``THOR(model, **THOR.preset("paper"))``.

        Args:
            name: ``"paper"``: the step of the paper, without a bound. Or a setting of the trace
                rule (Chen et al. 2021, section 4): ``"thor"``: a layer keeps its factors if the
                trace has changed by 1 % or less; ``"thor_stop"``: the same, and below 0.1 % it
                stops for good; ``"thor_nt"``: no trace rule.

        Returns:
            ``trace_thresholds``; for ``"paper"`` also ``kl_clip`` and ``max_update_ratio``, both
            None.

        Raises:
            ValueError: there is no such setting.
        """
        if name not in PRESETS:
            raise ValueError(
                f"preset {name!r} is not known; use one of {', '.join(map(repr, PRESETS))}"
            )
        return dict(PRESETS[name])

    def sample_fisher(
        self,
        output: Any,
        distribution: Predicts = "categorical",
        *,
        dim: int | None = None,
        mask: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """Gather statistics from labels drawn from the model's predictions.

        This does nothing between refreshes.

        Call it once for each forward pass, before ``loss.backward()``; a refresh step without it
        has no statistics. It costs a backward pass from the drawn labels to the outputs of the
        layers, without the gradients of weights. ``.grad`` and torch's random generators are not
        changed.

        Args:
            output: the predictions of the model, not detached.
            distribution: the distribution of the labels given the output: ``"categorical"`` (of
                logits, for ``cross_entropy``), ``"bernoulli"`` (of logits, for
                ``binary_cross_entropy_with_logits``), ``"normal"`` (of means, with variance 1, for
                half of ``mse_loss``), or a callable from the output to a
                ``torch.distributions.Distribution``, which is called on refresh steps only. Each
                element of its ``batch_shape`` is a loss term; N is their number, unless
                ``loss_terms`` is set.
            dim: the dimension of categorical logits that holds the classes. None means the last
                one, and is allowed for logits of at most two dimensions.
            mask: bool, in the shape of the labels, True for the labels that count
                (``labels != -100``); None: all.
            seed: determines the drawn labels, together with the step, the process and the number of
                the call.

        Raises:
            RuntimeError: the optimizer was created with ``fisher="empirical"``, the call is not
                between a forward pass and its ``loss.backward()``, it is the second call for this
                forward pass, or the model is a DDP with a static graph.
            ValueError: the distribution is unknown, ``dim`` or ``mask`` does not fit, or the output
                has no gradient.
        """
        capture = self._curvature.capture
        if capture.sampler is None:
            raise RuntimeError(
                'sample_fisher() has no use with fisher="empirical", which takes the labels of the '
                "training loss; "
                'leave the call out, or make the optimizer with THOR(..., fisher="sampled")'
            )
        if not capture.awaited or not torch.is_grad_enabled():
            return
        key = f"{seed}/{self.param_groups[0]['step']}/{self._curvature.processes.rank}"
        try:
            capture.sampler.sample(output, distribution, dim, mask, key)
        except BaseException:
            capture.discard()
            raise

    def _make_parameter_state(
        self, binding: Binding, parameter: Tensor, state: dict[str, Any], group: Group
    ) -> None:
        if group["momentum"] and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, dtype=factor_dtype(parameter.dtype)
            )
