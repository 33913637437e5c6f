"""What the optimizers share.

All of them step eagerly inside of compiled functions. THOR and ThorMuon share construction, step,
refresh of the layers' curvature, and reports.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_thor.capture.coverage import Coverage, Rest
from torch_thor.capture.hooks import suspended_stances
from torch_thor.capture.sharding import check_shards_fit
from torch_thor.curvature.blocks import ieee_float32
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.lifecycle import Life
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.distributed.options import Distributed
from torch_thor.optim import counterparts, persistence, report
from torch_thor.optim.callers import refuse_divided_parameters
from torch_thor.optim.check import Check
from torch_thor.optim.inputs import StepInputs, StepRequest, creates_state_only, nonfinite_message
from torch_thor.optim.learned import Look, looks_trained
from torch_thor.optim.loss_scale import LossScale, asked_by_lightning, remove_scale
from torch_thor.optim.model_argument import Closure, Group, check_known, parameters_of_model
from torch_thor.optim.options import (
    COUNTERS,
    OPTIONS,
    OptionGroup,
    check,
    check_group,
    group_of,
    options_in,
    scoped,
)
from torch_thor.optim.plan import Binding, Form
from torch_thor.optim.preconditioner import Preconditioner
from torch_thor.optim.state_dict import VERSION
from torch_thor.torch_internals import (
    compiler_in_use,
    refuse_running_fullgraph,
    refuse_tracing_fullgraph,
    traced_not_compiled,
    use_compiler,
)

LossTerms = int | Tensor | Callable[[], int | Tensor] | None

_NO_FULL_GRAPH = (
    "torch.compile(fullgraph=True) of a function that calls {}.step() or its zero_grad(): a step "
    "decides by values of tensors, which no graph does; leave fullgraph out, and the step runs "
    "eagerly between the graphs"
)


class EagerStep(torch.optim.Optimizer):
    """An optimizer whose ``step`` runs eagerly in compiled functions, as one call between graphs.

    Traced, it would be compiled again for each refresh and each state, and stop at each value of a
    tensor that it reads.
    """

    # options of other optimizers, and what stands in the place of each
    counterparts: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def profile_hook_step(cls, func: Callable[..., Any]) -> Callable[..., Any]:
        """Do what torch does to ``step`` when the first optimizer of a class is made, and more."""
        message = _NO_FULL_GRAPH.format(cls.__name__)
        eagerly = torch.compiler.disable(super().profile_hook_step(func), reason=message)

        # What this calls and what it reads are no part of the graphs: the call of `eagerly` ends
        # them.
        @traced_not_compiled
        @wraps(func)
        def step(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                refuse_tracing_fullgraph(message)
            # nothing is traced if step itself was compiled, or if a refresh is due
            elif compiler_in_use() is not None or suspended_stances:
                refuse_running_fullgraph(message)
            result = eagerly(*args, **kwargs)
            if suspended_stances:  # the rest of the function that runs may call the model
                use_compiler(None)
            return result

        return step

    def _own_groups(self) -> None:
        """Take groups that other code has put in the place of the optimizer's as its own."""
        self.param_groups[:] = [
            group if isinstance(group, OptionGroup) else OptionGroup(group)
            for group in self.param_groups
        ]

    def _check_group(self, group: Group) -> None:
        """Raise ValueError for an option that is out of range."""
        check_group(self, group)

    def _take(self, group: Group) -> None:
        """Take a group that was added, or raise an error for parameters that do not fit."""

    def _as_saved(self, group: Group) -> None:
        """Change a group of a state dict to the form that is saved."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``; it is copied.

        Raises:
            ValueError: an option is out of range or one of another optimizer, or a parameter is
                not in the model.
            TypeError: it is no dict.
        """
        group, before = group_of(param_group), len(self.param_groups)
        self._check_group({**self.defaults, **group})
        counterparts.check_group(type(self), group, self.defaults)
        super().add_param_group(group)
        try:
            self._take(self.param_groups[-1])
        except BaseException:
            del self.param_groups[before:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers, strings, and dicts of them.

        Hooks that are registered for it see this form. ``version`` is that of the form.

        Returns:
            As ``torch.optim.Optimizer.state_dict``.
        """
        self._own_groups()

        def finish(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            for group in state_dict["param_groups"]:
                self._as_saved(group)
            state_dict["version"] = VERSION

        handle = self.register_state_dict_post_hook(finish, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own_groups()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as any optimizer of torch does.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.
        """
        if torch.compiler.is_dynamo_compiling() and set_to_none:  # torch's would end the graph
            refuse_tracing_fullgraph(_NO_FULL_GRAPH.format(type(self).__name__))
            # for the attribute itself the compiler would guard all options and counters
            for group in self.__dict__["param_groups"]:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none)


class CurvatureOptimizer(EagerStep):
    """A base class of optimizers that precondition layers with Kronecker factors.

    A subclass defines ``_update``, and ``_make_parameter_state`` if its update has a state. Its
    constructor hands on the model and its ``locals()``, in which are the options that
    ``torch_thor.optim.options`` declares.

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

    # the factors that it uses, and how it trains what has none
    form: ClassVar[Form] = Form(Rest("plain momentum"))
    # the lr that serves all tasks from scratch, so that another is told; None if there is none
    usual_lr: ClassVar[float | None] = None

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        model: nn.Module | None,
        given: Mapping[str, Any],
    ) -> None:
        label = type(self).__name__
        refuse_divided_parameters(label)
        params, model = parameters_of_model(params, model, label)
        options = options_in(given)
        more = {name: given.get(name, OPTIONS[name].default) for name in scoped("optimizer")}
        check(type(self), {**options, **more, "layers": None})  # they are selected in the model
        distributed = more["distributed"] or Distributed()
        if distributed.whole_matrices and not self.form.orthogonalises:
            raise ValueError(
                f"whole_matrices=True: must be False with {label}, which orthogonalises nothing; "
                "leave it out"
            )
        form = replace(
            self.form,
            optimizer=type(self),
            options=tuple(options),
            loss_reduction=more["loss_reduction"],
            fisher=more["fisher"],
        )
        self._curvature = Preconditioner(model, form, more["layers"], distributed)
        self.loss_terms: LossTerms = None
        self.nonfinite = "raise"
        self.grad_scaler: Any = None
        self._skipped_steps = 0
        # on an accelerator: the check of the gradients of the step before, and what it has counted:
        # groups with their counters, and layers with their lives, as they were
        self._check: Check | None = None
        self._before: tuple[list[tuple[Group, int, int]], dict[LayerCurvature, Life]] | None = None
        # states with the entries that processes divide, collected
        self._consolidated: dict[Tensor, dict[str, Any]] | None = None
        options.update(COUNTERS)
        super().__init__(params, options)
        binding = self._binding()
        self._curvature.listen()
        check_shards_fit(
            [(n, p) for n, (p, s) in binding.plan.sharded.items() if s],
            self.distributed.process_group,
        )
        entries = self.coverage()
        # what the model has got later may be adapters
        self._known = {entry.name for entry in entries}
        used = any(e.preconditioned and e.trained for e in entries)
        if not used and (form.has_g or not any(entry.trained for entry in entries)):
            raise ValueError(report.nothing_found(type(self), binding))
        report.warn_of_little(entries, label)

    # what is read at construction alone
    model = property(
        attrgetter("_curvature.model"), doc="The model whose layers are preconditioned."
    )
    layers = property(
        attrgetter("_curvature.chosen"),
        doc="The layers that are preconditioned, as they were given.",
    )
    distributed = property(
        attrgetter("_curvature.distributed"), doc="How this optimizer trains with other processes."
    )
    loss_reduction = property(
        attrgetter("_curvature.form.loss_reduction"),
        doc='Whether the loss is a ``"mean"`` or a ``"sum"``.',
    )
    fisher = property(
        attrgetter("_curvature.form.fisher"),
        doc='The labels of the statistics: ``"empirical"`` or ``"sampled"``.',
    )

    # ---- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
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
        curvature = self._curvature
        curvature.last_refresh = ()
        self._read_check()
        try:
            loss = None if closure is None else torch.enable_grad()(closure)()
            state_only = not self.state and creates_state_only(self.param_groups)
            # GradScaler sets this attribute before it calls step()
            scaled = self.grad_scaler is not None or hasattr(self, "found_inf")
            scale = partial(LossScale, self) if scaled else None
            request = StepRequest(self.loss_terms, self.nonfinite, scale, state_only)
            if not all(isinstance(group, OptionGroup) for group in self.param_groups):
                self._own_groups()
            inputs = curvature.read(self.param_groups, self.state, request)
            if inputs.skip:
                curvature.capture.discard()
                self._skipped_steps += inputs.nonfinite
                return loss
            binding = curvature.refresh(
                inputs, self._make_parameter_state, self._look, state_only=state_only
            )
            # nothing raises from here on, so a step is taken completely or not at all
            if not state_only:
                with ExitStack() as precision:
                    for device_type in binding.device_types:
                        precision.enter_context(ieee_float32(device_type))
                    self._update(binding, inputs.found_inf)
                self._advance(inputs)
            return loss
        except BaseException as error:
            remove_scale(self)  # GradScaler removes it only after a step that succeeds
            if isinstance(error, FloatingPointError):
                curvature.capture.discard()
            raise

    def _as_saved(self, group: Group) -> None:
        persistence.as_saved(group)

    def _binding(self) -> Binding:
        """Return the plan, bound to the groups and the state as they are now."""
        return self._curvature.current(self.param_groups, self.state)

    def _update(self, binding: Binding, found_inf: Tensor | None) -> None:
        """Update every parameter with a gradient; on a device, none where ``found_inf`` is 1."""
        raise NotImplementedError

    def _make_parameter_state(
        self, binding: Binding, parameter: Tensor, state: dict[str, Any], group: Group
    ) -> None:
        """Add the entries of the update that the state of a parameter lacks; none by default."""

    def _read_check(self, *, raises: bool = True) -> None:
        """Learn whether the step before changed anything, where the device was not waited for."""
        check = self._check
        if check is None:
            return
        failed = check.failed()
        if failed:
            self._undo()
            if self.nonfinite == "raise" and not raises:
                return  # the next step raises the error
        self._check = None
        if failed and self.nonfinite == "skip":
            self._skipped_steps += 1
        elif failed:
            self._curvature.capture.discard()
            raise FloatingPointError(nonfinite_message(self._binding(), check.bad()))

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite."""
        self._read_check(raises=False)
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skipped_steps = count

    def _advance(self, inputs: StepInputs) -> None:
        """Count the step, and register the hooks that the next one needs."""
        lives: dict[LayerCurvature, Life] = {}
        if inputs.check is not None:
            counters = [(g, g["step"], g["next_refresh"]) for g in self.param_groups]
            self._check, self._before = inputs.check, (counters, lives)
            inputs.check.send()
        for group, at in zip(self.param_groups, inputs.next_refreshes, strict=True):
            dict.update(group, step=group["step"] + 1, next_refresh=at)  # plain already
        # what consolidate_state_dict() has collected is that of the step before
        self._consolidated = None
        warnings, binding = self._curvature.warnings, inputs.binding
        if not inputs.largest and binding.plan.first_shards is None:
            warnings.note_nothing_trained(binding, self._known)
        if self.usual_lr is not None and self.param_groups[0]["step"] in report.LR_JUDGED:
            warnings.note_lr(
                self.param_groups, self.usual_lr, partial(looks_trained, binding.plan.model)
            )
        lives.update(self._curvature.finish(inputs))

    def _undo(self) -> None:
        """Put back, once, what a step has counted that has changed nothing."""
        if self._before is None:
            return
        counters, lives = self._before
        for group, step, at in counters:
            dict.update(group, step=step, next_refresh=at)
        for layer, life in lives.items():
            layer.record(**vars(life))
        self._before = None
        self._curvature.listen()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop their statistics.

        Statistics of a backward pass that is still to come stay.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.
        """
        capture = self._curvature.capture
        if capture.awaited and (capture.sampler is None or capture.sampler.trained):
            capture.evidence.late.clear()
            capture.evidence.dropped |= bool(capture.reached)
            capture.discard()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # see LossScale; if the user gave the scaler, it unscales gradients and skips steps as for
        # any optimizer
        return self.grad_scaler is None and not asked_by_lightning()

    def _look(self, binding: Binding) -> Look | None:
        """Return what is to be read of the weights when a state is completed; nothing as a rule."""
        del binding
        return None

    # ---- groups, plan and state ------------------------------------------------------------------

    def _take(self, group: Group) -> None:
        check_known(group["params"], self.model)
        if self._curvature.binding is not None:
            self._binding()
            self._curvature.listen_again()

    # ---- state dicts -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers, strings, and dicts of them.

        Hooks that are registered for it see this form. ``version`` is that of the form.

        Returns:
            As ``torch.optim.Optimizer.state_dict``; a schedule of ``torch_thor.intervals`` is a
            dict. Under FSDP2, tensors whose rows are divided are DTensors, as the parameters are.

        Raises:
            RuntimeError: the curvature is divided among processes (``divide_curvature=True``), and
                has not been collected by ``consolidate_state_dict`` since the last step.
        """
        self._read_check(raises=False)
        binding = self._curvature.binding
        is_divided = binding is not None and bool(binding.owners)
        with persistence.consolidating(self.state, self._consolidated if is_divided else {}):
            return super().state_dict()

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
        self._read_check(raises=False)
        persistence.load(self, self._curvature, super().load_state_dict, state_dict)
        self._check = self._consolidated = None

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the curvature that is divided among the processes, for the next ``state_dict``.

        All processes must call it, after the last step. It does nothing unless
        ``divide_curvature=True``.

        Args:
            to: the rank that collects, in the process group; None for all, as
                torch.distributed.checkpoint needs it.
        """
        self._consolidated = None
        self._consolidated = persistence.consolidated(self._binding(), self._curvature, to)

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
        return MappingProxyType(self._curvature.plan.layers)

    @property
    def row_mask(self) -> Tensor | None:
        """The rows of sequences that count, as a ``bool`` tensor ``(N, L)``.

        It is True for real tokens and False for padding.

        Set it before each forward pass, as in ``optimizer.row_mask = attention_mask.bool()``; None
        counts every row. It applies to layers whose input has these leading dimensions, and to
        embeddings whose input has this shape. It does not change the number of loss terms: see
        ``loss_terms``.
        """
        return self._curvature.capture.row_mask

    @row_mask.setter
    def row_mask(self, mask: Tensor | None) -> None:
        check(type(self), {"row_mask": mask})
        self._curvature.capture.row_mask = mask

    @property
    def last_refresh(self) -> tuple[RefreshEvent, ...]:
        """The decisions of the latest ``step``, one per refreshed layer; empty if none.

        They are not part of checkpoints.
        """
        return self._curvature.last_refresh

    def coverage(self) -> Coverage:
        """List how each parameter of the model is trained.

        Returns:
            One entry per parameter, in the model's order: its kind and factor sizes, or the reason
            why it has none. It prints as a table.
        """
        return Coverage(report.current(self._binding()))

    def __repr__(self) -> str:
        return report.described(self)
