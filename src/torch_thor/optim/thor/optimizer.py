"""THOR: the trace-based, layer-wise natural-gradient optimizer (Chen et al., AAAI 2021), for any PyTorch model.

One step reads as the algorithm does: the statistics were captured in forward and backward; refresh the layers that are
due; precondition; update with weight decay, clipping and momentum. What a layer's curvature is and how it is inverted
stands in :mod:`torch_thor.curvature`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.capture import Capture
from torch_thor.capture.coverage import Covered, table
from torch_thor.capture.inspection import Inspection, inspect_model
from torch_thor.capture.module_hooks import hooks_of
from torch_thor.capture.selection import Selection
from torch_thor.curvature.layer import SIDES, LayerCurvature
from torch_thor.curvature.processes import ALONE, Processes
from torch_thor.curvature.refresh import RefreshEvent, refresh
from torch_thor.distributed.process_group import Membership
from torch_thor.distributed.statistics import pool
from torch_thor.optim.checkpoint import (
    as_a_whole,
    check_factors,
    check_moments,
    check_thors,
    complete_groups,
    hooked_load,
    options_of,
    restore_tensors,
)
from torch_thor.optim.decay import DecayFilter, decay_filter_of
from torch_thor.optim.parameters import ParameterIndex, parameters_of, with_gradient
from torch_thor.optim.thor import clock
from torch_thor.optim.thor.auto_split import AutoSplit, block_size
from torch_thor.optim.thor.candidates import candidates_of
from torch_thor.optim.thor.conform import Look, conform, gone_message, look
from torch_thor.optim.thor.covered import covered_now, sizes, warn_of_little
from torch_thor.optim.thor.gradient_checks import (
    check_row_mask,
    check_statistics,
    doubtful_terms_message,
    largest_gradient,
    nonfinite_message,
    nonfinite_names,
    some,
)
from torch_thor.optim.thor.loss_scale import LossScale
from torch_thor.optim.thor.natural_gradient import update
from torch_thor.optim.thor.options import (
    AUTO,
    UpdateInterval,
    check_group,
    check_loss_terms,
    check_optimizer,
    check_scaling,
    preset_options,
    with_defaults,
)
from torch_thor.optim.thor.reports import Reports
from torch_thor.optim.thor.sampled_fisher import SampledFisher
from torch_thor.optim.thor.scale_free import spectral_update
from torch_thor.optim.thor.state import KeptState
from torch_thor.optim.thor.step_inputs import Reading, read_alike
from torch_thor.optim.thor.summed_loss import looks_summed, message

LossTerms = int | Tensor | Callable[[], int | Tensor] | None

# What a copied or pickled optimizer keeps beside groups and state; layers and hooks are found anew on its model.
_COPIED = (
    "model",
    "scaling",
    "fisher",
    "decay_filter",
    "loss_reduction",
    "loss_terms",
    "nonfinite",
    "grad_scaler",
    "skipped_steps",
    "skip",
    "only",
    "_membership",
)


class THOR(SampledFisher, torch.optim.Optimizer):
    """Natural gradient with Kronecker factors, refreshed layer by layer when their trace has changed.

    For linear layers, convolutions (1d to 3d, transposed, grouped), embeddings and the projections of
    ``nn.MultiheadAttention``: ``ΔW = (1/T) · (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` with the empirical Fisher's factors
    A (input) and G (output gradient of one loss term); biases are solved with G alone. Then weight decay
    (``+ weight_decay · W``), the bound on the step, and momentum as :class:`torch.optim.SGD` has it. Everything else,
    normalisation layers among it, is trained by SGD with momentum under the same bound; :meth:`coverage` lists what
    each parameter gets. The model is not changed, and the training loop is the usual one.

    Make it before a wrapper replaces the parameters: build the model, ``THOR(model)``, then DDP.
    ``torch.compile`` may come before or after; steps that gather statistics run eagerly, all others compiled.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``.
        model: the model, where ``params`` are parameters.
        lr: learning rate, a float or a one-element tensor; None: 0.05 (0.08 with ``scaling="spectral"``). THOR's steps
            are natural-gradient steps: their length hangs on lr and damping together, and SGD's lr is no guide.
        damping: λ > 0; ``√(λ/T)`` is added to the diagonal of both factors; None: 0.03 (spectral: 0.1). Schedule it
            like lr: it stands in every parameter group. Inverses have the damping of the refresh that made them.
        momentum: μ in [0, 1); None: 0.9 (spectral: 0.8).
        nesterov: step along ``d + μ v`` instead of ``v``; None: False (spectral: True).
        weight_decay: added to the natural gradient as ``weight_decay · W`` (so it is not preconditioned).
        decay_filter: which parameters decay: ``(name, parameter) -> bool``; or a pattern or a list of them, as
            :mod:`fnmatch` has them, with a minus in front for what does not: ``["*.weight", "-*norm*"]``; None: all.
        update_interval: steps between refreshes; or a schedule of :mod:`torch_thor.intervals`, or any callable, from
            the step of a refresh (counted from 0) to the steps until the next. The first step refreshes. It stands in
            each parameter group and may be changed there: the next refresh asks it. None: 100 (spectral:
            ``Geometric(1, 50, factor=1.5)``, every step at first and every 50th from step 98 on).
        trace_thresholds: ``(ω1, ω2)``, section 3.2 of the paper: on a refresh a layer whose trace changed by more than
            ω1 takes new factors, by less than ω2 stops for good, else keeps what it has. ``(0, 0)`` takes them always.
        split_dim: block size of the factors (section 3.3), None for full factors. ``"auto"`` chooses it for this model
            and device in the first step (:func:`torch_thor.choose_split_dim`, from that step's statistics), keeps the
            choice in the user's cache and finds it there the next time. The number then stands in the parameter group.
            With ``scaling="spectral"`` it is also the number of rows that are orthogonalised together.
        factor_decay: weight of the old factors in a running average; 0, as the paper has it, keeps the latest only.
            None: 0 (spectral: 0.5).
        kl_clip: κ; scales the step of the preconditioned layers by ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))`` (Ba et al., ICLR
            2017). Left out, ``max_update_ratio`` bounds the step in its place. None: no bound at all, as the paper has
            it, unless ``max_update_ratio`` is given.
        loss_reduction: ``"mean"`` where the loss is the mean over the mini-batch's loss terms, ``"sum"`` where it is
            their sum.
        max_update_ratio: r; a step ``lr · d`` of a parameter, before momentum, is at most r times as long as the
            parameter, ``lr · ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)`` (:mod:`torch_thor.optim.thor.step_bound`). Left out:
            0.01 (spectral: None, its steps have a length of their own), or None where ``kl_clip`` is given. None: no
            bound.
        scaling: None for THOR's own step length, or ``"spectral"``: momentum on the raw gradient, preconditioned with
            the inverse of A alone, orthogonalised and given a norm of its own, so that lr means the same on every layer
            and task; decoupled weight decay; AdamW for what is no matrix (:mod:`torch_thor.optim.thor.scale_free`).
            λ is then relative to the mean diagonal of A, and statistics are taken in the forward pass.
        fisher: whose labels statistics come from. ``"empirical"``: those of the training loss. ``"sampled"``: labels
            drawn from the model's own predictions, of which :meth:`sample_fisher` must be told in each forward pass.
        loss_terms: N, over how many terms the loss of ONE step averages (all micro-batches together): a number, a
            callable that returns it, or None for the number of samples (the leading dimension of the inputs) in each
            backward pass, summed over the passes of a step. Give it where that is not what the loss averages over
            (tokens, padding); ``optimizer.loss_terms = n`` may be set any time before ``step``.
        skip: layers to leave to SGD with momentum: names or patterns as :mod:`fnmatch` has them (a module's name means
            every layer inside it), or a callable ``(name, module) -> bool``.
        only: layers to keep, in the same words; the rest is left to SGD with momentum.
        nonfinite: what a NaN or inf in a gradient does: ``"raise"`` FloatingPointError, or ``"skip"`` the step and
            count it in ``skipped_steps``. Either way nothing has changed.
        grad_scaler: the gradient scaler, needed only where it is not a ``torch.amp.GradScaler`` and gradients are
            unscaled before ``scaler.step(optimizer)``: else THOR finds out by itself how what it captures is scaled.
        process_group: the processes that train this model together and average its gradients, as DDP does: their
            statistics are averaged on refresh steps. None: the default group, if ``torch.distributed`` is initialised
            by the time of a step; False: none, every process trains a model of its own.

    Raises:
        ValueError: an option is out of range, a parameter is not the model's, a pattern matches no layer, or nothing
            can be preconditioned.
        TypeError: ``params`` are parameters and ``model`` is missing.
    """

    _made_for: Look | None  # what the state was last found to fit

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
    ) -> None:
        params, model = parameters_of(params, model, "THOR")
        if model is None:
            raise TypeError(
                "model=None: THOR reads the inputs of layers, so it must know the model; pass THOR(model, ...), "
                "or THOR(parameters, model=model, ...)"
            )
        check_optimizer(
            loss_reduction=loss_reduction,
            nonfinite=nonfinite,
            scaling=scaling,
            fisher=fisher,
            loss_terms=loss_terms,
        )
        self.model = model
        self.scaling = scaling
        self.fisher = fisher
        self.decay_filter = decay_filter_of(decay_filter, model)
        self.loss_reduction = loss_reduction
        self.loss_terms = loss_terms
        self.skip = skip
        self.only = only
        self.nonfinite = nonfinite
        self.grad_scaler = grad_scaler
        self.process_group = process_group
        self.skipped_steps = 0
        self._last_refresh: tuple[RefreshEvent, ...] = ()
        self._reset()
        defaults = {
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
            "step": 0,  # the clock of the group, and the step of its next refresh: in the group, where DCP sees them
            "next_refresh": 0,
            "last_loss_terms": 0,  # N of the latest refresh, for whoever wants to know it
            "loss_scale": 1.0,  # what gradients are divided by: N where the loss is a sum that was taken for a mean
        }
        defaults = with_defaults(defaults, scaling)
        check_group(defaults)
        super().__init__(params, defaults)
        self._use(self._survey())
        if not any(layer.weight.requires_grad for layer in self._layers.values()):
            raise ValueError(self._nothing_found(self._covered))
        if only is None:
            warn_of_little(self.coverage(), stacklevel=2)
        if self._processes().count == 1:  # several find a number together, in a step
            self._auto_split().from_cache(ALONE)

    # ---- what users look at -------------------------------------------------------------------------------------

    @staticmethod
    def preset(name: str) -> dict[str, Any]:
        """Return the options of a setting by name: ``THOR(model, **THOR.preset("paper"))``.

        Args:
            name: ``"paper"``, the step of the paper, which nothing bounds. Or one of its settings of the trace rule
                (Chen et al. 2021, section 4): ``"thor"``, a layer keeps its factors where the trace changed by 1 % or
                less; ``"thor_stop"``, the same, and below 0.1 % it stops for good; ``"thor_nt"``, no trace rule.

        Returns:
            ``trace_thresholds``; for ``"paper"`` also ``kl_clip`` and ``max_update_ratio``, both None.

        Raises:
            ValueError: there is no such setting.
        """
        return preset_options(name)

    @property
    def curvature(self) -> Mapping[str, LayerCurvature]:
        """The preconditioned layers, by module name."""
        return MappingProxyType(self._layers)

    @property
    def row_mask(self) -> Tensor | None:
        """Which rows of sequences count: ``bool``, ``(N, L)``, True for real tokens and False for padding.

        Set it before each forward pass, as ``optimizer.row_mask = attention_mask.bool()``; None counts every row. It
        holds for layers whose input has these leading dimensions (embeddings: that shape). The number of loss terms
        is another matter: see ``loss_terms``.
        """
        return self._capture.row_mask

    @row_mask.setter
    def row_mask(self, mask: Tensor | None) -> None:
        if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim()):
            what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(
                f"row_mask={what}: must be a bool tensor (N, L), True for the rows that count, or None; "
                f"use attention_mask.bool()"
            )
        self._capture.row_mask = mask

    @property
    def process_group(self) -> Any:
        """The processes that train this model together, as given: a group, None for the default one, or False."""
        return self._membership.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._membership = Membership(group)

    @property
    def last_refresh(self) -> tuple[RefreshEvent, ...]:
        """What the latest :meth:`step` did with the layers that were due; empty where none was. Not in checkpoints."""
        return self._last_refresh

    def coverage(self) -> list[Covered]:
        """List how each parameter of the model is trained.

        Returns:
            An entry a parameter, in the model's order: kind and factor sizes, or the reason why it has none.
        """
        self._index.update(self.param_groups, self.state)
        changed = self._index.gone(self.model) or self._index.computed
        entries = self._survey_model().entries if changed else self._covered
        return self._now(entries)

    def __repr__(self) -> str:
        entries = self.coverage()
        covered, total = sizes(entries)
        there = [layer for layer in self._layers.values() if layer.weight_piece.is_there]
        layers = sum(layer.weight.requires_grad for layer in there)
        split = ", ".join(str(s) for s in dict.fromkeys(g["split_dim"] for g in self.param_groups))
        return (
            f"{super().__repr__()}\n{covered:,} of {total:,} trained parameters, in {layers} layers, are "
            f"preconditioned:\n{table(entries, split)}"
        )

    # ---- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: refresh the layers that are due, precondition, update.

        Args:
            closure: reevaluates the model and returns the loss; called first, with gradients enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            FloatingPointError: a gradient holds NaN or inf (``nonfinite="raise"``); nothing has changed.
            RuntimeError: layers that are due have gradients, and no statistics came of any, or the state no longer fits
                the model; nothing has changed.
        """
        loss = None
        self._last_refresh = ()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._index.update(self.param_groups, self.state)
        if self._capture.watching or self._index.computed:
            self._let_go()
        replaced = self._replaced
        refreshing = self._refreshing()
        kept = KeptState(self.state, self.param_groups, self._index, self.scaling)
        state_only = kept.is_asked_for()
        if not state_only:
            self._membership.announce(self.model)
        processes = ALONE if state_only else self._processes()
        # What follows holds for all processes: on a refresh step they agree, else they have the same gradients.
        together = processes if refreshing else ALONE
        try:
            reading = read_alike(together, self._read, self.param_groups, refreshing, self._settings())
        except FloatingPointError:
            self._capture.discard()
            raise
        if reading.skipped:
            self._capture.discard()
            self.skipped_steps += reading.counted
            return loss
        waiting = self._capture.wanting
        try:
            uncalled = self._gather(refreshing, reading, together)
            if reading.looked != self._made_for:
                kept.materialise(self._layers.values())
                self._made_for = look(self.param_groups, self.state, self._index)
            if refreshing and not state_only:
                self._refresh(refreshing, reading.terms, uncalled, together)
        except BaseException:  # the sums may be half scaled, or half summed
            self._capture.discard()
            raise
        if state_only:
            return loss
        # From here on nothing raises: a step is taken as a whole or not at all.
        if waiting and not refreshing:
            self._capture.finish_step()
        decaying = reading.decaying
        if self.scaling == "spectral":
            spectral_update(self.param_groups, self._index, kept.scale_free, lambda p: id(p) in decaying)
        else:
            update(self.param_groups, self._index, kept.momentum_buffer, lambda p: id(p) in decaying)
        clock.advance(self.param_groups, reading.refreshes)
        due = any(clock.refreshes_next(group) for group in self.param_groups)
        if due:
            layers = self._layers.values()
            self._capture.want(one for one in layers if clock.refreshes_next(self._index.group(one.weight)))
        if replaced is not None:
            self._use(replaced)
        elif waiting or due:
            self._capture.listen()
        self._reports.tell()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the statistics that were gathered with them.

        Args:
            set_to_none: as in :meth:`torch.optim.Optimizer.zero_grad`.
        """
        self._capture.discard_with_gradients()
        super().zero_grad(set_to_none)
        self._capture.note_gradients()

    def _settings(self) -> Iterator[str]:
        """What must be the same on all processes, beside the options of the groups."""
        yield f"loss_reduction={self.loss_reduction!r}"
        yield f"fisher={self.fisher!r}"
        sampler = self._capture.sampler
        if sampler is not None:
            yield f"sampled labels: {'yes' if sampler.passes else 'no'}"

    def _read(self) -> Reading:
        """Look at what this process has for the step, and raise what is wrong with it."""
        for group in self.param_groups:
            check_group(group)  # again: a schedule may have run damping down to 0
        looked = look(self.param_groups, self.state, self._index)
        if looked != self._made_for:
            conform(self.param_groups, self.state, self._layers.values(), self._index)
        refreshes = tuple(clock.next_refreshes(self.param_groups))
        scale = LossScale(self, self.grad_scaler)
        if scale.found_inf:
            return Reading(refreshes=refreshes, skipped=True)
        given = self.loss_terms() if callable(self.loss_terms) else self.loss_terms
        terms = self._capture.loss_terms if given is None else check_loss_terms(given)
        if given is None and self._capture.doubtful_terms:
            message = doubtful_terms_message(*self._capture.doubtful_terms)
            self._reports.note(message, message)
        sampled = self._capture.sampler is not None  # gradients of single terms as they are
        with_g = any(one.rows and "G" in one.sides for one in self._layers.values())
        captured = scale.of_outputs() if with_g and not sampled else 1.0
        decaying = frozenset(
            id(p) for group, p, _ in with_gradient(self.param_groups) if group["weight_decay"] and self._decays(p)
        )
        scale.unscale_(gradient for _, _, gradient in with_gradient(self.param_groups))
        largest = largest_gradient(self.param_groups, self._index)
        if not math.isfinite(largest):
            if self.nonfinite == "skip":
                return Reading(refreshes=refreshes, skipped=True, counted=True)
            raise FloatingPointError(
                nonfinite_message(self.param_groups[0]["step"], nonfinite_names(self.param_groups, self._index))
            )
        check_row_mask(self._layers.values(), self._capture)
        output_scale = (terms if self.loss_reduction == "mean" and not sampled else 1) / captured
        return Reading(
            terms,
            output_scale,
            refreshes,
            largest=largest,
            decaying=decaying,
            looked=looked,
        )

    def _gather(
        self, refreshing: list[LayerCurvature], reading: Reading, processes: Processes
    ) -> list[tuple[LayerCurvature, str]]:
        """Bring the statistics of all processes together, cut them as was chosen, and find the layers without any.

        Returns:
            The layers that are not called, with what to say of each.
        """
        auto = self._auto_split()
        auto.from_cache(processes)
        for layer in refreshing:
            layer.scale_outputs_(reading.output_scale)
        pool(processes, refreshing, self._capture.reached, self._capture.inside_transform)
        uncalled = check_statistics(self._layers.values(), self._capture)
        auto.from_statistics(processes)
        return uncalled

    def _refreshing(self) -> list[LayerCurvature]:
        """The layers that are due, the same on every process, whichever of them has their rows."""
        if not self._capture.watching:
            return []
        return [layer for layer in self._layers.values() if self._capture.gathers(layer) and layer.weight.requires_grad]

    def _refresh(
        self,
        refreshing: list[LayerCurvature],
        terms: int,
        uncalled: list[tuple[LayerCurvature, str]],
        processes: Processes,
    ) -> None:
        """Decide on new factors for the layers that are due, and invert what is taken."""
        self._rescale_summed_loss(refreshing, terms, processes.count)
        absence = self._capture.absence(refreshing, [layer for layer, _ in uncalled])
        candidates = candidates_of(refreshing, terms, self._index, self._report, self._capture.reached)
        relative = self.scaling == "spectral"
        self._last_refresh = refresh(candidates, self._report, relative=relative, processes=processes)
        for layer, what in uncalled:
            self._report(layer, what)
        self._capture.finish_refresh(refreshing, self._last_refresh, absence)
        if terms:
            for group in self.param_groups:
                group["last_loss_terms"] = terms

    def _rescale_summed_loss(self, refreshing: list[LayerCurvature], terms: int, ranks: int) -> None:
        """Divide gradients and statistics of a summed loss by N; whether it is one, the first refresh decides."""
        groups = self.param_groups
        if not terms:  # no layer was reached: there is nothing to tell from, and what held before goes on
            return
        first = not any(layer.refreshes for layer in self._layers.values())
        bounded = any(group["max_update_ratio"] is not None for group in groups)
        told = self.loss_reduction == "mean" and self.fisher == "empirical"  # sampled statistics are not the loss's
        if first and bounded and told and looks_summed(refreshing, terms):
            self._reports.note("summed loss", message(terms))
        elif all(group["loss_scale"] == 1.0 for group in groups):
            return
        scale = terms / ranks  # ranks have averaged their gradients already
        for group in groups:
            group["loss_scale"] = scale
        for layer in refreshing:
            layer.scale_outputs_(1.0 / scale)

    # ---- guards -------------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # see LossScale; with a scaler of our own to ask, GradScaler unscales and skips as it does for any optimizer
        return self.grad_scaler is None

    def _report(self, layer: LayerCurvature, what: str) -> None:
        """Have a layer's trouble told after the step, once each kind of it."""
        step = self._index.group(layer.weight)["step"]
        self._reports.note((layer.name, what), f"THOR, step {step}, layer {layer.name!r}: {what}")

    # ---- bookkeeping --------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._layers: dict[str, LayerCurvature] = {}
        self._covered: list[Covered] = []
        self._reports = Reports()
        self._made_for = None
        self._replaced: Inspection | None = None
        self._last_refresh = ()
        self._capture = Capture(sampled=self.fisher == "sampled")
        self._index = ParameterIndex(self.model)
        self._attached = False

    def _let_go(self) -> None:
        """Leave out the layers whose modules are no longer in the model, or compute their weight now (pruning)."""
        gone, computed = self._index.gone(self.model), self._index.computed
        if not gone and not computed:
            return
        found = self._survey()
        before = set(self._layers)
        self._layers = self._still_there(found)
        for name in gone:
            self._reports.note((name, "gone"), gone_message(name, self._covered, found.entries))
        for name in sorted(before - set(found.layers)) if computed else ():
            self._reports.note((name, "computed"), gone_message(name, self._covered, found.entries, computed=True))
        self._index.survey(self.model)
        self._index.set_layers(self._layers, found.matrices)
        self._index.update(self.param_groups, self.state)
        self._capture.follow(hooks_of({k: found.layers[k] for k in self._layers}, self._layers))
        self._replaced = found  # what has come is looked at after this step, which has no statistics of it

    def _still_there(self, found: Inspection) -> dict[str, LayerCurvature]:
        """The layers of before whose weights are still those that have their names."""
        layers = found.layers
        return {k: old for k, old in self._layers.items() if k in layers and old.is_of(layers[k].weight)}

    def _survey_model(self) -> Inspection:
        return inspect_model(
            self.model,
            [p for group in self.param_groups for p in group["params"]],
            skip=self.skip,
            only=self.only,
            matrices_alone=self.scaling is not None,
        )

    def _survey(self) -> Inspection:
        """Find out what every parameter gets, some of them curvature."""
        found = self._survey_model()
        if not found.layers:
            raise ValueError(self._nothing_found(found.entries))
        return found

    def _use(self, found: Inspection) -> None:
        """Watch the layers that were found."""
        self._made_for = self._replaced = None
        self._covered = found.entries
        index = self._index
        index.survey(self.model)
        known = self._still_there(found)
        self._layers = {
            name: known.get(name)
            or LayerCurvature(
                name,
                layer.kind,
                layer.weight,
                layer.biases,
                lambda: index.states,
                lambda weight: block_size(index.group(weight)),
                layer.prefix,
                sides=SIDES if self.scaling is None else SIDES[:1],
            )
            for name, layer in found.layers.items()
        }
        self._index.set_layers(self._layers, found.matrices)
        self._index.update(self.param_groups, self.state)
        self._capture.follow(hooks_of(found.layers, self._layers))
        self._attached = True
        self._capture.resume()

    def _now(self, entries: Iterable[Covered]) -> list[Covered]:
        return covered_now(entries, dict(self.model.named_parameters()), self._index)

    def _nothing_found(self, entries: Iterable[Covered]) -> str:
        return (
            f"THOR found no layer to precondition among what is trained in {type(self.model).__name__}; use "
            f"torch.optim.SGD, or give THOR the weights of its layers. What it found:\n{table(self._now(entries), '-')}"
        )

    def _processes(self) -> Processes:
        return self._membership.processes(next(iter(self._layers.values())).weight.device)

    def _auto_split(self) -> AutoSplit:
        return AutoSplit(self.param_groups, self._layers, self._index)

    def _decays(self, parameter: nn.Parameter) -> bool:
        return self.decay_filter is None or bool(self.decay_filter(self._index.name(parameter), parameter))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with options of their own.

        Args:
            param_group: as for :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option is out of range, or a parameter is not the model's.
        """
        complete = {**self.defaults, **param_group}
        check_scaling([complete], self.scaling)
        check_group(complete)
        if self.param_groups:  # one loss trains them all
            param_group.setdefault("loss_scale", self.param_groups[0]["loss_scale"])
        super().add_param_group(param_group)
        ours = {id(p) for p in self.model.parameters()}
        strangers = [str(tuple(p.shape)) for p in self.param_groups[-1]["params"] if id(p) not in ours]
        if strangers:
            self.param_groups.pop()
            raise ValueError(
                f"parameters of shape {some(strangers)} are not in the model, so THOR cannot see their layers run; "
                f"pass the model that holds them, or give them an optimizer of their own"
            )
        if self._attached:
            self._use(self._survey())

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers and strings.

        Returns:
            As :meth:`torch.optim.Optimizer.state_dict`; a schedule stands in it as text.
        """
        state_dict = super().state_dict()
        return {**state_dict, "param_groups": [clock.plain(group) for group in state_dict["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as a whole, or raise and have changed nothing; tensors take the dtype that the model asks for.

        Args:
            state_dict: what ``state_dict()`` of a THOR gave, this version's or an earlier one's: options that it does
                not hold stay as they are. So does ``update_interval`` where it is a function, here or in the run that
                was saved: functions are the program's. Schedules of :mod:`torch_thor.intervals` are loaded like any
                option.

        Raises:
            ValueError: it is another optimizer's, has other groups or parameters, tensors of other shapes, NaN or inf,
                an option that is out of range, or an unknown schedule.
        """
        self._index.update(self.param_groups, self.state)
        if self._index.computed:
            self._use(self._survey())
        own = options_of(self.param_groups)
        try:
            with as_a_whole(self):
                saved = hooked_load(self, super().load_state_dict, state_dict, check_thors)
                complete_groups(self.param_groups, own)
                for group, kept, given in zip(self.param_groups, own, saved["param_groups"], strict=True):
                    group["update_interval"] = clock.loaded_interval(given, kept["update_interval"])
                    check_scaling([group], self.scaling)
                    check_group(group)
                restore_tensors(self.state, self.param_groups, saved)
                self._index.update(self.param_groups, self.state)
                check_factors(self._layers.values())
                check_moments(self.state, self.param_groups, self._index.name)
        finally:
            self._index.update(self.param_groups, self.state)
        self._made_for = None
        self._capture.discard()
        self._capture.resume()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # a copy or an unpickled one; load_state_dict calls this too, with state and groups only
            self._reset()
            self._use(self._survey())
