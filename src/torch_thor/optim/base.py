"""What THOR and ThorMuon share: construction, the step, the refresh of the layers' curvature, and what they report."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_thor.capture.capture import Capture
from torch_thor.capture.coverage import Covered, table
from torch_thor.capture.patterns import Patterns, some
from torch_thor.capture.sharding import check_shards_fit
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.distributed.divided import DividedInverses, divide
from torch_thor.distributed.group import Distributed
from torch_thor.optim import covered, persistence
from torch_thor.optim.checkpoint import conform
from torch_thor.optim.options import OPTIONS, check
from torch_thor.optim.parameters import Group, parameters_of
from torch_thor.optim.plan import Plan
from torch_thor.optim.refresh_step import refresh_layers
from torch_thor.optim.step import Inputs, creates_state_only, read_inputs, remove_scale

LossTerms = int | Tensor | Callable[[], int | Tensor] | None

# The entries of a parameter group that are not options: its parameters, and the counters of step(). They are stored in
# the group, so that torch.distributed.checkpoint saves them.
COUNTERS = {"step": 0, "next_refresh": 0, "last_loss_terms": 0}


class CurvatureOptimizer(torch.optim.Optimizer):
    """A base class of optimizers that precondition layers with Kronecker factors; a subclass defines ``_update``.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``.
        options: the options of a parameter group, by name.
        model: the model, where ``params`` are parameters.
        layers: the layers to precondition (:mod:`torch_thor.capture.patterns`); None for all.
        distributed: how to train with other processes.
        loss_reduction: see :class:`torch_thor.THOR`.
        fisher: see :class:`torch_thor.THOR`.

    Attributes:
        loss_terms: N, the number of terms that the loss of one step averages over, all micro-batches together: a
            number, a callable that returns it, or None for the number of samples (the leading dimension of the inputs)
            in each backward pass, summed over the passes of a step. Set it if the loss averages over something else
            (tokens, padding).
        nonfinite: what happens if a gradient holds NaN or inf: ``"raise"`` FloatingPointError, or ``"skip"`` the step
            and count it in ``skipped_steps``. In both cases nothing has changed.
        grad_scaler: the gradient scaler, needed only if it is not a ``torch.amp.GradScaler`` and gradients are
            unscaled before ``scaler.step(optimizer)``.
        skipped_steps: the number of steps that were skipped because a gradient was not finite.
    """

    sides: ClassVar[tuple[str, ...]]  # the factors that are used: ("A", "G") or ("A",)
    relative_damping: ClassVar[bool]  # whether the damping is relative to the mean diagonal of a factor
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
        params, model = parameters_of(params, model, label)
        if model is None:
            raise TypeError(
                f"model=None: {label} reads the inputs of layers, so it must know the model; pass {label}(model, ...), "
                f"{label}(parameters, model=model, ...) or, to a factory, functools.partial({label}, model=model)"
            )
        if not isinstance(distributed, Distributed | None):
            raise TypeError(f"distributed={distributed!r}: must be a torch_thor.Distributed, or None for its defaults")
        check(type(self), {**options, "loss_reduction": loss_reduction, "fisher": fisher})
        self._model, self._layers, self._fisher, self._loss_reduction = model, layers, fisher, loss_reduction
        self._distributed = Distributed() if distributed is None else distributed
        self.loss_terms: LossTerms = None
        self.nonfinite = "raise"
        self.grad_scaler: Any = None
        self.skipped_steps = 0
        self._last_refresh: tuple[RefreshEvent, ...] = ()
        self._warnings = StepWarnings()
        self._capture = Capture(sampled=fisher == "sampled")
        self._complete = False  # whether all state is there
        self._renewed = False  # whether the plan was made anew in this step
        self._checked: dict[int, dict[str, Any]] = {}  # options of each group that have passed the check
        # the steps of all groups, and by the id of a parameter the entries of its state that processes divide
        self._whole: tuple[list[int], dict[int, dict[str, Tensor]]] | None = None
        super().__init__(params, {**options, **COUNTERS})
        self._adopt(self._make_plan(None))
        self._capture.listen()
        check_shards_fit([(n, p) for n, (p, s) in self._plan.sharded.items() if s], self.distributed.process_group)
        entries = self.coverage()
        used = any(e.preconditioned and e.trained for e in entries)
        if not used and ("G" in self.sides or not any(entry.trained for entry in entries)):
            raise ValueError(self._nothing_found(entries))
        covered.warn_of_little(entries, label, stacklevel=3)

    # ---- read-only options ----------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model whose layers are preconditioned."""
        return self._model

    @property
    def layers(self) -> Patterns:
        """The layers that are preconditioned, as they were given."""
        return self._layers

    @property
    def distributed(self) -> Distributed:
        """How this optimizer trains with other processes."""
        return self._distributed

    @property
    def loss_reduction(self) -> str:
        """``"mean"`` if the loss is the mean over the loss terms of the mini-batch, ``"sum"`` if it is their sum."""
        return self._loss_reduction

    @property
    def fisher(self) -> str:
        """The labels that the statistics use: ``"empirical"`` or ``"sampled"``."""
        return self._fisher

    # ---- the step -------------------------------------------------------------------------------------------------

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
            state_only = creates_state_only(self)
            inputs = read_inputs(self, state_only)
            if inputs.skip:
                self._capture.discard()
                self.skipped_steps += inputs.nonfinite
                return loss
            if inputs.due or not self._complete:
                refresh_layers(self, inputs, state_only)
            if not state_only:  # nothing raises from here on, so a step is taken completely or not at all
                self._update(self._plan, self._inverses())
                self._advance(inputs)
            return loss
        except BaseException as error:
            remove_scale(self)  # GradScaler removes it only after a step that succeeds
            if isinstance(error, FloatingPointError):
                self._capture.discard()
            raise

    def _update(self, plan: Plan, inverses: DividedInverses | None) -> None:
        """Update every parameter that has a gradient."""
        raise NotImplementedError

    def _make_parameter_state(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        """Add the entries of the update that the state of a parameter lacks."""
        raise NotImplementedError

    def _inverses(self) -> DividedInverses | None:
        return DividedInverses() if self.distributed.divide_curvature and persistence.is_divided(self) else None

    def _advance(self, inputs: Inputs) -> None:
        """Count the step, and register the hooks that the next one needs."""
        for group, at in zip(self.param_groups, inputs.next_refreshes, strict=True):
            group["step"], group["next_refresh"] = group["step"] + 1, at
        self._whole = None  # what consolidate_state_dict() has collected is that of the step before
        if not inputs.largest and self._plan.first_shards is None:
            self._warn_if_nothing_trains()
        changed = self._renewed or bool(inputs.due)
        if not inputs.due and self._capture.gathering:
            changed = self._capture.finish_step() or changed
        if any(group["step"] >= group["next_refresh"] for group in self.param_groups):
            for layer in self._plan.layers.values():
                options = layer.weight_view.options
                if options["step"] >= options["next_refresh"]:
                    layer.record(due=not layer.stopped)
            changed = True
        if changed:
            self._renewed = False
            self._capture.listen()
        self._warnings.issue()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop their statistics; those of a backward pass that is still to come stay.

        Args:
            set_to_none: as in :meth:`torch.optim.Optimizer.zero_grad`.
        """
        self._capture.discard_with_gradients()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # see LossScale; if the user gave the scaler, it unscales gradients and skips steps as for any optimizer
        return self.grad_scaler is None

    # ---- groups, plan and state -----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with options of their own.

        Args:
            param_group: as for :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option is out of range, or a parameter is not in the model.
        """
        check(type(self), {**self.defaults, **param_group})
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            known = {id(p) for p in self.model.parameters()}
            unknown = [str(tuple(p.shape)) for p in self.param_groups[-1]["params"] if id(p) not in known]
            if unknown:
                raise ValueError(
                    f"parameters of shape {some(unknown)} are not in the model, so their layers cannot be seen; pass "
                    f"the model that holds them, or give them an optimizer of their own"
                )
            if hasattr(self, "_plan"):
                self._plan_now()
                self._capture.listen()
        except BaseException:
            del self.param_groups[before:]
            raise

    def _check_groups(self) -> None:
        """Check the options of all groups that were replaced since they were last checked."""
        check(type(self), {"nonfinite": self.nonfinite})
        for group in self.param_groups:
            checked = self._checked.setdefault(id(group), {})
            for name, option in OPTIONS.items():
                value = group.get(name, checked)
                # a tensor or a list may have been changed in place
                if value is checked or (value is checked.get(name, checked) and not isinstance(value, list | Tensor)):
                    continue
                if not option.test(value):
                    check(type(self), {name: value})
                checked[name] = value

    def _make_plan(self, before: Plan | None) -> Plan:
        return Plan(self.model, self.param_groups, self.state, self.sides, self.layers, before)

    def _adopt(self, plan: Plan) -> None:
        self._plan, self._complete, self._renewed = plan, False, True
        self._capture.follow(plan.hooks)

    def _plan_now(self) -> Plan:
        """Return the plan; the same object unless something that it describes was replaced."""
        plan = self._plan
        lost = self._capture.watching and plan.has_lost_modules()
        if not lost and plan.fingerprint == plan.fingerprint_now(self.param_groups, self.state):
            return plan
        now = self._make_plan(plan)
        if not now.layers and "G" in self.sides:
            raise ValueError(self._nothing_found(now.entries))
        conform(now, self.param_groups, self.state)
        self._note_changes(plan, now)
        self._adopt(now)
        return now

    def _make_state(self, *, divided: bool) -> None:
        """Create all state that is missing, in the first step and after parameters were added."""
        # All entries are created at once, so that a checkpoint has the same keys on every rank and at every time. They
        # are not created with the optimizer, because wrappers may replace the parameters after that.
        plan = self._plan
        layers = list(plan.layers.values())
        if self.distributed.divide_curvature and divided:
            divide(layers, self.distributed.processes(plan.device))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    state = self.state[parameter]
                    # torch.distributed.checkpoint reports a parameter without state as missing
                    state.setdefault("preconditioned", int(bool(plan.shares(parameter))))
                    self._make_parameter_state(parameter, state, group)
        plan.bind(self.state)
        for layer in layers:
            layer.make_state()
        plan.fingerprint = plan.fingerprint_now(self.param_groups, self.state)
        self._complete = True

    # ---- state dicts ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers and strings.

        Returns:
            As :meth:`torch.optim.Optimizer.state_dict`; a schedule of :mod:`torch_thor.intervals` is stored as text.
            Under FSDP2, tensors whose rows are divided are DTensors, as the parameters are.

        Raises:
            RuntimeError: the curvature is divided among processes (``divide_curvature=True``), and has not been
                collected by :meth:`consolidate_state_dict` since the last step.
        """
        with persistence.whole_state(self):
            state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group["update_interval"] = persistence.plain_interval(group["update_interval"])
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if it raises an error, nothing has changed.

        Args:
            state_dict: a result of :meth:`state_dict`. ``update_interval`` keeps its value if it is a function here or
                in the run that was saved, because state dicts contain no functions; schedules of
                :mod:`torch_thor.intervals` are loaded like any other option.

        Raises:
            ValueError: it is the state dict of another optimizer; it has other groups or parameters, or tensors of
                other shapes; it was saved with other ``layers``; or it holds NaN or inf, an option that is out of
                range, or an unknown schedule.
        """
        persistence.load(self, super().load_state_dict, state_dict)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the curvature that is divided among the processes, for the next :meth:`state_dict`.

        All processes must call it, after the last step. It does nothing unless ``divide_curvature=True``.

        Args:
            to: the rank that collects, in the process group; None for all, as torch.distributed.checkpoint needs it.
        """
        persistence.consolidate(self, to)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because its layers belong to the model: save "
            f"optimizer.state_dict(), make the optimizer again on the (copied) model, and load it"
        )

    # ---- warnings -------------------------------------------------------------------------------------------------

    def _report(self, layer: LayerCurvature, what: str) -> None:
        """Warn of a problem of a layer after the step, once for each layer and problem."""
        step, label = layer.weight_view.options["step"], type(self).__name__
        self._warnings.note((layer.name, what), f"{label}, step {step}, layer ", layer.name, f": {what}")

    def _note_changes(self, before: Plan, now: Plan) -> None:
        """Warn of what a change of the model means: layers that are gone, parameters that are not trained."""
        label, untrained = type(self).__name__, now.untrained_since(before)
        then = covered.untrained_message(untrained) if untrained else "What takes their place is trained plainly"
        if now.sharded and not before.sharded:
            self._warnings.note(
                "divided",
                f"{label}: the parameters were divided among processes after {label} was made, so this step has no "
                f"statistics that it can use; make {label} after fully_shard",
            )
        for name in sorted(before.layers.keys() - now.layers.keys()):
            self._warnings.note(
                (name, "gone"),
                f"{label}: the weight of layer ",
                name,
                f" is no longer a parameter of the model that is trained: it was removed, replaced, pruned or "
                f"parametrised after {label} was made. {then}",
            )

    def _warn_if_nothing_trains(self) -> None:
        """Warn once if no parameter of the groups has a gradient, and the model has got others since, as by LoRA."""
        if any(p.grad is not None for p in self._plan.parameters(self.param_groups)):
            return
        known = {entry.name for entry in self._plan.entries}
        untrained = covered.untrained(self._plan)
        new = [name for name, p in self.model.named_parameters() if p.requires_grad and name not in known] + untrained
        if new:
            self._warnings.note(
                "nothing trained",
                f"{type(self).__name__}, step {self.param_groups[0]['step'] - 1}: no parameter in its groups has a "
                f"gradient, so nothing is trained. {covered.untrained_message(new)} Where an adapter was added (LoRA), "
                f"make it first: peft.get_peft_model(model, ...), then the optimizer",
            )

    def _nothing_found(self, entries: list[Covered]) -> str:
        label, found = type(self).__name__, table(covered.current(entries, self._plan), "-")
        return (
            f"{label} found no layer to precondition among what is trained in {type(self.model).__name__}; use "
            f"torch.optim.SGD, or give {label} the weights of its layers. What it found:\n{found}"
        )

    # ---- what is reported -----------------------------------------------------------------------------------------

    @property
    def curvature(self) -> Mapping[str, LayerCurvature]:
        """The preconditioned layers, by module name."""
        return MappingProxyType(self._plan.layers)

    @property
    def row_mask(self) -> Tensor | None:
        """The rows of sequences that count: ``bool``, ``(N, L)``, True for real tokens and False for padding.

        Set it before each forward pass, as in ``optimizer.row_mask = attention_mask.bool()``; None counts every row. It
        applies to layers whose input has these leading dimensions, and to embeddings whose input has this shape. It
        does not change the number of loss terms: see ``loss_terms``.
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
    def last_refresh(self) -> tuple[RefreshEvent, ...]:
        """The decisions of the latest :meth:`step`, one per refreshed layer; empty if none. Not part of checkpoints."""
        return self._last_refresh

    def coverage(self) -> list[Covered]:
        """List how each parameter of the model is trained.

        Returns:
            One entry per parameter, in the model's order: its kind and factor sizes, or the reason why it has none.
        """
        return covered.current(self._plan_now().entries, self._plan)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            keys = [key for key in dict.fromkeys((*self.defaults, *group)) if key in group and key not in COUNTERS]
            lines += [f"Parameter Group {number}"]
            lines += [f"    {key}: {group[key]}" for key in keys if key not in ("params", "param_names")]
        entries = self.coverage()
        part, total = covered.sizes(entries)
        layers = sum(layer.weight.requires_grad for layer in self._plan.layers.values())
        split = ", ".join(str(s) for s in dict.fromkeys(g["split_dim"] for g in self.param_groups))
        return (
            "\n".join((*lines, ")"))
            + f"\n{part:,} of {total:,} trained parameters, in {layers} layers, are preconditioned:\n"
            + table(entries, split)
        )


class StepWarnings:
    """Warnings that are issued when the step is complete, each once: a program may turn warnings into errors."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._pending: dict[tuple[str, str], list[str]] = {}  # the names that one text is about, by its two parts

    def note(self, about: Hashable, message: str, name: str | None = None, then: str = "") -> None:
        """Add a warning, unless one about the same problem has been added before."""
        if about not in self._known:
            self._known.add(about)
            names = self._pending.setdefault((message, then), [])
            names += [] if name is None else [repr(name)]

    def issue(self) -> None:
        """Issue the warnings that have been added."""
        pending, self._pending = self._pending, {}
        for (message, then), names in pending.items():
            others = f" (likewise {some(names[1:])})" if len(names) > 1 else ""
            text = f"{message}{''.join(names[:1])}{others}{then}"
            warnings.warn(text, RuntimeWarning, stacklevel=6)  # the caller of step, outside torch's wrappers
