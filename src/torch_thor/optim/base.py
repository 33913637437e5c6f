"""What THOR and ThorMuon share: construction, step, refresh of the layers' curvature, reports."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_thor.capture.coverage import Coverage
from torch_thor.capture.gathering import Capture
from torch_thor.capture.patterns import Patterns
from torch_thor.capture.sharding import check_shards_fit
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.distributed.processes import Distributed
from torch_thor.optim import persistence, report
from torch_thor.optim.loss_scale import asked_by_lightning, remove_scale
from torch_thor.optim.options import check
from torch_thor.optim.parameters import Group, check_known, parameters_of_model
from torch_thor.optim.plan import Plan
from torch_thor.optim.refresh_step import refresh_layers
from torch_thor.optim.step import Inputs, creates_state_only, plan_now, read_inputs, renew

LossTerms = int | Tensor | Callable[[], int | Tensor] | None

# The entries of a parameter group that are not options: its parameters, and the counters of step().
# They are stored in the group, so that torch.distributed.checkpoint saves them.
COUNTERS = {"step": 0, "next_refresh": 0, "last_loss_terms": 0}


class CurvatureOptimizer(torch.optim.Optimizer):
    """A base class of optimizers that precondition layers with Kronecker factors.

    A subclass defines ``_update``.

    Attributes:
        loss_terms: N, the number of terms that the loss of one step averages over, all
            micro-batches together: a number, a callable that returns it, or None for the number of
            samples (the leading dimension of the inputs) in each backward pass, summed over the
            passes of a step. Set it if the loss averages over something else (tokens, padding).
        nonfinite: what happens if a gradient holds NaN or inf: ``"raise"`` FloatingPointError, or
            ``"skip"`` the step and count it in ``skipped_steps``. In both cases nothing has
            changed.
        grad_scaler: the gradient scaler, needed only if it is not a ``torch.amp.GradScaler`` and
            gradients are unscaled before ``scaler.step(optimizer)``.
        skipped_steps: the number of steps that were skipped because a gradient was not finite.
    """

    sides: ClassVar[tuple[str, ...]]  # the factors that are used: ("A", "G") or ("A",)
    # whether the damping is relative to the mean diagonal of a factor
    relative_damping: ClassVar[bool]
    trace_thresholds: ClassVar[tuple[float, float]]  # where a group has none

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        options: dict[str, Any],
        *,
        model: nn.Module | None,
        layers: Patterns,
        distributed: Distributed | None,
        loss_reduction: str = "mean",
        fisher: str = "empirical",
    ) -> None:
        label = type(self).__name__
        params, model = parameters_of_model(params, model, label)
        if not isinstance(distributed, Distributed | None):
            raise TypeError(
                f"distributed={distributed!r}: must be a torch_thor.Distributed, or None for its "
                "defaults"
            )
        check(type(self), {**options, "loss_reduction": loss_reduction, "fisher": fisher})
        self._model, self._layers, self._fisher, self._loss_reduction = (
            model,
            layers,
            fisher,
            loss_reduction,
        )
        self._distributed = Distributed() if distributed is None else distributed
        self.loss_terms: LossTerms = None
        self.nonfinite = "raise"
        self.grad_scaler: Any = None
        self.skipped_steps = 0
        self._last_refresh: tuple[RefreshEvent, ...] = ()
        self._warnings = report.StepWarnings()
        self._capture = Capture(sampled=fisher == "sampled")
        self._complete = False  # whether all state is there
        self._renewed = False  # whether the plan was made anew in this step
        # options of each group that have passed the check
        self._checked: dict[int, dict[str, Any]] = {}
        # the entries that processes divide, collected
        self._whole: dict[Tensor, dict[str, Any]] | None = None
        super().__init__(params, {**options, **COUNTERS})
        self._plan: Plan
        renew(self)
        self._capture.listen()
        check_shards_fit(
            [(n, p) for n, (p, s) in self._plan.sharded.items() if s],
            self.distributed.process_group,
        )
        entries = self.coverage()
        # what the model has got later may be adapters
        self._known = {entry.name for entry in entries}
        used = any(e.preconditioned and e.trained for e in entries)
        if not used and ("G" in self.sides or not any(entry.trained for entry in entries)):
            raise ValueError(report.nothing_found(self, self._plan, entries))
        report.warn_of_little(entries, label, stacklevel=3)

    # what is read at construction alone
    model = property(attrgetter("_model"), doc="The model whose layers are preconditioned.")
    layers = property(
        attrgetter("_layers"), doc="The layers that are preconditioned, as they were given."
    )
    distributed = property(
        attrgetter("_distributed"), doc="How this optimizer trains with other processes."
    )
    loss_reduction = property(
        attrgetter("_loss_reduction"), doc='Whether the loss is a ``"mean"`` or a ``"sum"``.'
    )
    fisher = property(
        attrgetter("_fisher"), doc='The labels of the statistics: ``"empirical"`` or ``"sampled"``.'
    )

    # ---- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: refresh the layers that are due, precondition, update.

        Args:
            closure: evaluates the model again and returns the loss; called first, with gradients
                enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            FloatingPointError: a gradient holds NaN or inf (``nonfinite="raise"``); nothing has
                changed.
            RuntimeError: layers to refresh have gradients but no statistics, or the state does not
                fit; no change.
        """
        self._last_refresh = ()
        try:
            loss = None if closure is None else torch.enable_grad()(closure)()
            state_only = not self.state and creates_state_only(self)
            inputs = read_inputs(self, state_only)
            if inputs.skip:
                self._capture.discard()
                self.skipped_steps += inputs.nonfinite
                return loss
            if inputs.due or not self._complete:
                refresh_layers(self, inputs, state_only)
            # nothing raises from here on, so a step is taken completely or not at all
            if not state_only:
                self._update(self._plan)
                self._advance(inputs)
            return loss
        except BaseException as error:
            remove_scale(self)  # GradScaler removes it only after a step that succeeds
            if isinstance(error, FloatingPointError):
                self._capture.discard()
            raise

    def _update(self, plan: Plan) -> None:
        """Update every parameter that has a gradient."""
        raise NotImplementedError

    def _make_parameter_state(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        """Add the entries of the update that the state of a parameter lacks."""
        raise NotImplementedError

    def _advance(self, inputs: Inputs) -> None:
        """Count the step, and register the hooks that the next one needs."""
        for group, at in zip(self.param_groups, inputs.next_refreshes, strict=True):
            group["step"], group["next_refresh"] = group["step"] + 1, at
        self._whole = None  # what consolidate_state_dict() has collected is that of the step before
        if not inputs.largest and self._plan.first_shards is None:
            report.note_nothing_trained(self)
        if self.param_groups[0]["step"] in report.LR_JUDGED:
            report.note_lr(self)
        changed = self._renewed or bool(inputs.due)
        if not inputs.due and self._capture.gathering:
            changed = self._capture.finish_step() or changed
        for group in self.param_groups:
            if group["step"] >= group["next_refresh"]:
                for layer in self._plan.layers.values():
                    if layer.weight_view.options is group:
                        layer.record(due=not layer.stopped)
                changed = True
        if changed:
            self._renewed = False
            self._capture.listen()
        if self._warnings.pending:
            self._warnings.issue()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop their statistics.

        Statistics of a backward pass that is still to come stay.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.
        """
        sampler = self._capture.sampler
        if self._capture.awaited and (sampler is None or sampler.trained):
            self._capture.discard()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # see LossScale; if the user gave the scaler, it unscales gradients and skips steps as for
        # any optimizer
        return self.grad_scaler is None and not asked_by_lightning()

    # ---- groups, plan and state ------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with options of their own.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ValueError: an option is out of range, or a parameter is not in the model.
        """
        check(type(self), {**self.defaults, **param_group})
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            check_known(self.param_groups[-1]["params"], self.model)
            if hasattr(self, "_plan"):
                plan_now(self)
                self._capture.listen()
        except BaseException:
            del self.param_groups[before:]
            raise

    # ---- state dicts -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers and strings.

        Returns:
            As ``torch.optim.Optimizer.state_dict``; a schedule of ``torch_thor.intervals`` is
            stored as text. Under FSDP2, tensors whose rows are divided are DTensors, as the
            parameters are.

        Raises:
            RuntimeError: the curvature is divided among processes (``divide_curvature=True``), and
                has not been collected by ``consolidate_state_dict`` since the last step.
        """
        with persistence.whole_state(self):
            state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group["update_interval"] = persistence.plain_interval(group["update_interval"])
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if it raises an error, nothing has changed.

        Args:
            state_dict: a result of ``state_dict``. ``update_interval`` keeps its value if it is a
                function here or in the run that was saved, because state dicts contain no
                functions; schedules of ``torch_thor.intervals`` are loaded like any other option.

        Raises:
            ValueError: it is the state dict of another optimizer; it has other groups or
                parameters, or tensors of other shapes; it was saved with other ``layers``; or it
                holds NaN or inf, an option that is out of range, or an unknown schedule.
        """
        persistence.load(self, super().load_state_dict, state_dict)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the curvature that is divided among the processes, for the next ``state_dict``.

        All processes must call it, after the last step. It does nothing unless
        ``divide_curvature=True``.

        Args:
            to: the rank that collects, in the process group; None for all, as
                torch.distributed.checkpoint needs it.
        """
        persistence.consolidate(self, to)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because its layers belong to the "
            "model: save optimizer.state_dict(), make the optimizer again on the (copied) model, "
            "and load it"
        )

    # ---- what is reported ------------------------------------------------------------------------

    @property
    def curvature(self) -> Mapping[str, LayerCurvature]:
        """The preconditioned layers, by module name."""
        return MappingProxyType(self._plan.layers)

    @property
    def row_mask(self) -> Tensor | None:
        """The rows of sequences that count, as a ``bool`` tensor ``(N, L)``.

        It is True for real tokens and False for padding.

        Set it before each forward pass, as in ``optimizer.row_mask = attention_mask.bool()``; None
        counts every row. It applies to layers whose input has these leading dimensions, and to
        embeddings whose input has this shape. It does not change the number of loss terms: see
        ``loss_terms``.
        """
        return self._capture.row_mask

    @row_mask.setter
    def row_mask(self, mask: Tensor | None) -> None:
        if mask is not None and not (
            isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim()
        ):
            what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(
                f"row_mask={what}: must be a bool tensor (N, L), True for the rows that count, or "
                f"None; use attention_mask.bool()"
            )
        self._capture.row_mask = mask

    @property
    def last_refresh(self) -> tuple[RefreshEvent, ...]:
        """The decisions of the latest ``step``, one per refreshed layer; empty if none.

        They are not part of checkpoints.
        """
        return self._last_refresh

    def coverage(self) -> Coverage:
        """List how each parameter of the model is trained.

        Returns:
            One entry per parameter, in the model's order: its kind and factor sizes, or the reason
            why it has none. It prints as a table.
        """
        return Coverage(report.current(plan_now(self).entries, self._plan))

    def __repr__(self) -> str:
        return report.described(self)
