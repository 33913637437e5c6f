"""THOR: the trace-based, layer-wise natural-gradient optimizer (Chen et al., AAAI 2021), for any PyTorch model.

:meth:`THOR.step` follows the algorithm: statistics have been captured in the forward and backward pass; it refreshes
the layers that are due, preconditions the gradients and updates the weights (layers: :mod:`torch_thor.curvature`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.selection import Selection
from torch_thor.curvature.processes import ALONE
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.distributed.sharded_parameters import check_shards_fit
from torch_thor.intervals import UpdateInterval
from torch_thor.optim.auto_split import AutoSplit, check_whole
from torch_thor.optim.covered import warn_of_little
from torch_thor.optim.decay import DecayFilter, decay_filter_of
from torch_thor.optim.divided_curvature import DividedInverses
from torch_thor.optim.layer_registry import LayerRegistry
from torch_thor.optim.loss_scale import remove_scale
from torch_thor.optim.natural_gradient import NaturalGradient
from torch_thor.optim.parameters import parameters_of
from torch_thor.optim.persistence import Persistence
from torch_thor.optim.refresh_step import prepare_next_step, refresh_layers
from torch_thor.optim.reporting import Reporting
from torch_thor.optim.sampled_fisher import SampledFisher
from torch_thor.optim.scale_free import ScaleFree
from torch_thor.optim.step_inputs import collect
from torch_thor.optim.thor_options import (
    AUTO,
    check_communication_dtype,
    check_division,
    check_group,
    check_optimizer,
    preset_options,
    with_defaults,
)

LossTerms = int | Tensor | Callable[[], int | Tensor] | None


class THOR(Persistence, Reporting, SampledFisher, torch.optim.Optimizer):
    """Natural gradient with Kronecker factors, refreshed layer by layer when their trace has changed.

    For linear layers, convolutions (1d to 3d, transposed, grouped), embeddings and the projections of
    ``nn.MultiheadAttention``: ``ΔW = (1/T) · (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` with the empirical Fisher's factors
    A (input) and G (output gradient of one loss term); biases are solved with G alone. Then weight decay
    (``+ weight_decay · W``), the bound on the step, and momentum as in :class:`torch.optim.SGD` are applied. All other
    parameters, including those of normalisation layers, are trained by SGD with momentum under the same bound;
    :meth:`coverage` lists the treatment of each parameter. Neither the model nor the training loop has to be changed.

    Create the optimizer after ``fully_shard`` (FSDP2, HSDP), which replaces the parameters, and before
    ``DistributedDataParallel``. ``torch.compile`` may come before or after; steps that gather statistics run eagerly,
    all others compiled.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``.
        model: the model, where ``params`` are parameters.
        lr: learning rate, a float or a one-element tensor; None: 0.05 (0.08 with ``scaling="spectral"``). The length
            of a natural-gradient step depends on lr and damping together, so a learning rate of SGD does not transfer.
        damping: λ > 0; ``√(λ/T)`` is added to the diagonal of both factors; None: 0.03 (spectral: 0.1). Schedule it
            like lr: every parameter group holds it. Inverses have the damping of the refresh that made them.
        momentum: μ in [0, 1); None: 0.9 (spectral: 0.8).
        nesterov: step along ``d + μ v`` instead of ``v``; None: False (spectral: True).
        weight_decay: added to the natural gradient as ``weight_decay · W`` (so it is not preconditioned).
        decay_filter: which parameters decay: ``(name, parameter) -> bool``; or one or more patterns of
            :mod:`fnmatch`, where a leading minus excludes: ``["*.weight", "-*norm*"]``; None: all.
        update_interval: steps between refreshes; or a schedule of :mod:`torch_thor.intervals` or any callable, from
            the step of a refresh (counted from 0) to the number of steps until the next. The first step refreshes. The
            option may be changed in each parameter group and is read at the next refresh. None: 100 (spectral:
            ``Geometric(1, 50, factor=1.5)``, every step at first and every 50th from step 98 on).
        trace_thresholds: ``(ω1, ω2)``, section 3.2 of the paper: on a refresh, a layer whose trace changed by more
            than ω1 takes new factors; by less than ω2, it stops for good; otherwise it keeps its factors. ``(0, 0)``
            always takes new ones.
        split_dim: block size of the factors (section 3.3), None for full factors. ``"auto"`` chooses it for this model
            and device in the first step (:func:`torch_thor.choose_split_dim`, from the statistics of that step),
            writes it into the parameter group, and stores it in the user's cache for the next time.
            With ``scaling="spectral"`` it is also the number of rows that are orthogonalised together.
        factor_decay: weight of the old factors in a running average; 0, as in the paper, uses the latest only.
            None: 0 (spectral: 0.5).
        kl_clip: κ; scales the step of the preconditioned layers by ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))`` (Ba et al. 2017), in
            the place of ``max_update_ratio``. None: no bound, as in the paper.
        loss_reduction: ``"mean"`` if the loss is the mean over the loss terms of the mini-batch, ``"sum"`` if it is
            their sum.
        max_update_ratio: r; the step ``lr · d`` of a parameter, before momentum, is at most r times as long as the
            parameter: ``lr · ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)`` (:mod:`torch_thor.optim.step_bound`); with
            ``scaling="spectral"``, each step of a matrix. Default: 0.01 (spectral: 0.15), or None if ``kl_clip`` is
            given. None: no bound. Under FSDP2 it bounds the rows of each process on their own.
        scaling: None for THOR's own step length, or ``"spectral"``: momentum on the raw gradient, preconditioned with
            A⁻¹ alone, orthogonalised, and scaled to a fixed norm, so that lr has the same meaning for every layer and
            task (deep networks take ``lr · √(10 / number of matrices)``); decoupled weight decay; AdamW for what is no
            matrix (:mod:`torch_thor.optim.scale_free`).
        fisher: the labels that the statistics use. ``"empirical"``: those of the training loss. ``"sampled"``: labels
            drawn from the model's own predictions, which :meth:`sample_fisher` needs after each forward pass.
        loss_terms: N, the number of terms that the loss of one step averages over, all micro-batches together: a
            number, a callable that returns it, or None for the number of samples (the leading dimension of the inputs)
            in each backward pass, summed over the passes of a step. Set it if the loss averages over something else
            (tokens, padding); ``optimizer.loss_terms = n`` may be set any time before ``step``.
        skip: layers that SGD with momentum trains instead: names or patterns of :mod:`fnmatch` (the name of a module
            stands for every layer inside it), or a callable ``(name, module) -> bool``.
        only: layers to precondition, given in the same way; SGD with momentum trains all others.
        nonfinite: what happens if a gradient holds NaN or inf: ``"raise"`` FloatingPointError, or ``"skip"`` the step
            and count it in ``skipped_steps``. In both cases nothing has changed.
        grad_scaler: the gradient scaler, needed only if it is not a ``torch.amp.GradScaler`` and gradients are
            unscaled before ``scaler.step(optimizer)``; otherwise THOR detects the scale of the gradients by itself.
        process_group: the processes that train this model together and average its gradients, as DDP does; their
            statistics are averaged on refresh steps. None: the default group, if ``torch.distributed`` is initialised
            by the time of a step; False: none, so that every process trains a model of its own.
        whole_matrices: with ``scaling="spectral"`` under FSDP2, whether one process orthogonalises each matrix as a
            whole (two all-to-all and an all-reduce in every step), or every process its own rows (nothing is sent).
        divide_curvature: with several processes, whether only the process that inverts a block keeps it and its inverse
            (1 / n of the memory), and every step collects the inverses; else all keep all, and ordinary steps send
            nothing. The steps are the same. State dicts then need :meth:`consolidate_state_dict` first.
        communication_dtype: the dtype in which blocks are sent; None: their own. ``torch.bfloat16`` halves the bytes.

    Raises:
        ValueError: an option is out of range, a parameter is not the model's, a pattern matches no layer, or nothing
            can be preconditioned (with ``scaling="spectral"``: nothing is trained).
        TypeError: ``params`` are parameters and ``model`` is missing.
    """

    _last_refresh: tuple[RefreshEvent, ...]
    _fitting: list[Any] | None  # the fingerprint of parameters and state when they were last found to fit
    _checked: dict[int, dict[str, Any]]  # options of each group that have passed check_group()

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor | None = None,
        damping: float | Tensor | None = None,
        momentum: float | None = None,
        nesterov: bool | None = None,
        weight_decay: float = 0.0,
        decay_filter: DecayFilter = None,
        update_interval: UpdateInterval | None = None,
        trace_thresholds: tuple[float, float] = (0.01, 0.0),
        split_dim: int | str | None = 128,
        factor_decay: float | None = None,
        kl_clip: float | str | None = AUTO,
        loss_reduction: str = "mean",
        scaling: str | None = None,
        *,
        max_update_ratio: float | str | None = AUTO,
        model: nn.Module | None = None,
        fisher: str = "empirical",
        loss_terms: LossTerms = None,
        skip: Selection = None,
        only: Selection = None,
        nonfinite: str = "raise",
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: Any = None,
        whole_matrices: bool = False,
        divide_curvature: bool = False,
        communication_dtype: torch.dtype | None = None,
    ) -> None:
        params, model = parameters_of(params, model, "THOR")
        if model is None:
            raise TypeError(
                "model=None: THOR reads the inputs of layers, so it must know the model; pass THOR(model, ...), "
                "THOR(parameters, model=model, ...) or, to a factory, functools.partial(THOR, model=model)"
            )
        check_optimizer(
            loss_reduction=loss_reduction, nonfinite=nonfinite, scaling=scaling, fisher=fisher, loss_terms=loss_terms
        )
        check_division(whole_matrices, divide_curvature, scaling)
        check_communication_dtype(communication_dtype)
        self.model = model
        self.scaling = scaling
        self.fisher = fisher
        self.decay_filter = decay_filter_of(decay_filter, model)
        self.loss_reduction = loss_reduction
        self.loss_terms = loss_terms
        self.skip = skip
        self.only = only
        self.nonfinite = nonfinite
        self.whole_matrices = whole_matrices
        self.divide_curvature = divide_curvature
        self.communication_dtype = communication_dtype
        self.grad_scaler = grad_scaler
        self.process_group = process_group
        self.skipped_steps = 0
        self._reset()
        self._given = {  # a group that is added later fills in its defaults by the same rule
            "lr": lr,
            "damping": damping,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "update_interval": update_interval,
            "trace_thresholds": trace_thresholds,
            "split_dim": split_dim,
            "factor_decay": factor_decay,
            "kl_clip": kl_clip,
            "max_update_ratio": max_update_ratio,
            "scaling": scaling,
            # counters are stored in the group, so that torch.distributed.checkpoint saves them
            "step": 0,
            "next_refresh": 0,  # the step of the next refresh
            "last_loss_terms": 0,  # N of the latest refresh, for information
            "loss_scale": 1.0,  # divides the gradients: N if the loss of loss_reduction="mean" is found to be a sum
        }
        defaults = with_defaults(self._given, scaling)
        check_group(defaults)
        super().__init__(params, defaults)
        registry = self._registry
        registry.find(self.param_groups, self.state)
        check_whole(self.param_groups, registry.index)
        check_shards_fit(registry.index.divided(), process_group)
        preconditioned = any(layer.weight.requires_grad for layer in registry.layers.values())
        if not preconditioned and (scaling is None or not any(one.trained for one in self.coverage())):
            raise ValueError(registry.nothing_found(self.coverage()))
        if only is None or not preconditioned:
            warn_of_little(self.coverage(), stacklevel=2)
        if self._processes().count == 1:  # several processes agree on the split dimension in a step
            AutoSplit(self.param_groups, registry.layers).from_cache(ALONE)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: refresh the layers that are due, precondition, update.

        Args:
            closure: evaluates the model again and returns the loss; called first, with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            FloatingPointError: a gradient holds NaN or inf (``nonfinite="raise"``); nothing has changed.
            RuntimeError: layers to refresh have gradients but no statistics, or the state does not fit; no change.
        """
        self._last_refresh = ()
        try:
            loss = None if closure is None else torch.enable_grad()(closure)()
            inputs = collect(self)
            if inputs.skipped:
                return loss
            if inputs.due or not inputs.fits:
                refresh_layers(self, inputs)
            if not inputs.state_only:  # nothing raises from here on, so a step is taken completely or not at all
                inverses = DividedInverses() if self.divide_curvature and self._is_divided() else None
                self._rule.update(self.param_groups, self._registry.index, self.state, inputs.decaying, inverses)
                for group, next_refresh in zip(self.param_groups, inputs.next_refreshes, strict=True):
                    group.update(step=group["step"] + 1, next_refresh=next_refresh)
                self._whole = None  # what consolidate_state_dict() has collected is that of the step before
                if inputs.waiting or inputs.refreshes_next or self._registry.replacement is not None:
                    prepare_next_step(self, inputs)
                if self._registry.warnings.pending:
                    self._registry.warnings.issue()
            return loss
        except BaseException:
            remove_scale(self)  # GradScaler removes it only after a step that succeeds
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop their statistics; those of a backward pass that is still to come stay.

        Args:
            set_to_none: as in :meth:`torch.optim.Optimizer.zero_grad`.
        """
        self._registry.capture.discard_with_gradients()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # see LossScale; if the user gave the scaler, it unscales gradients and skips steps as for any optimizer
        return self.grad_scaler is None

    @staticmethod
    def preset(name: str) -> dict[str, Any]:
        """Return the options of a named setting: ``THOR(model, **THOR.preset("paper"))``.

        Args:
            name: ``"paper"``: the step of the paper, without a bound. Or a setting of the trace rule (Chen et al. 2021,
                section 4): ``"thor"``: a layer keeps its factors if the trace has changed by 1 % or less;
                ``"thor_stop"``: the same, and below 0.1 % it stops for good; ``"thor_nt"``: no trace rule.

        Returns:
            ``trace_thresholds``; for ``"paper"`` also ``kl_clip`` and ``max_update_ratio``, both None.

        Raises:
            ValueError: there is no such setting.
        """
        return preset_options(name)

    def _reset(self) -> None:
        """Start without layers and hooks; ``self._registry.find`` must be called next."""
        self._rule = ScaleFree(whole_matrices=self.whole_matrices) if self.scaling else NaturalGradient()
        self._registry = LayerRegistry(
            self.model, self._rule.sides, skip=self.skip, only=self.only, sampled=self.fisher == "sampled"
        )
        self._last_refresh = ()
        self._fitting = None
        self._checked = {}

    def _decays(self, parameter: nn.Parameter) -> bool:
        assert self.decay_filter is not None
        return bool(self.decay_filter(self._registry.index.name(parameter), parameter))
