"""A model's curvature for an optimizer: which layers there are, their statistics and refreshes.

A :class:`Preconditioner` never sees the optimizer. It is given groups and state, and returns a
:class:`torch_thor.optim.batches.Binding`, which the update reads.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from torch_thor.capture.gathering import Capture, loss_terms_of_step
from torch_thor.capture.patterns import Patterns
from torch_thor.curvature.blocks import to_device
from torch_thor.curvature.communication import SINGLE_PROCESS, Processes
from torch_thor.curvature.layer import LayerCurvature, with_gradient
from torch_thor.curvature.lifecycle import when_interval_ends
from torch_thor.curvature.refresh import Candidate, RefreshEvent, refresh
from torch_thor.distributed.agreement import agree, count_rows
from torch_thor.distributed.data_parallel import DataParallel
from torch_thor.distributed.options import Distributed
from torch_thor.intervals import CALLABLE, as_interval, as_saved, check_interval
from torch_thor.optim import report
from torch_thor.optim.batches import Binding, parameters
from torch_thor.optim.model_argument import Group, States
from torch_thor.optim.options import COUNTERS, scoped, whole_number
from torch_thor.optim.plan import Form, Plan
from torch_thor.optim.state_dict import convert_state, fit_to_layers, load

LossTerms = int | Tensor | Callable[[], int | Tensor] | None


class Preconditioner:
    """The curvature of the layers of a model."""

    def __init__(
        self, model: nn.Module, form: Form, chosen: Patterns, distributed: Distributed
    ) -> None:
        self.model, self.form, self.chosen, self.distributed = model, form, chosen, distributed
        self.capture = Capture(sampled=form.fisher == "sampled")
        self.warnings = report.StepWarnings(form.optimizer)
        self.last_refresh: tuple[RefreshEvent, ...] = ()
        self.binding: Binding | None = None  # the plan as it was found and bound last
        self._heard: Binding | None = None  # the binding for which hooks are registered
        # for each parameter group, the step of its next refresh as of the end of this step
        self._upcoming: list[int] = []

    # ---- the plan --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What is known of the model, as it was found last."""
        assert self.binding is not None
        return self.binding.plan

    def current(self, groups: list[Group], states: States, *, modules: bool = True) -> Binding:
        """Return the plan as it is bound now: the same object unless something was replaced.

        ``modules``: whether to look for removed modules too, which takes time.

        Raises:
            ValueError: no layer is left to precondition; weights and state are as before.
        """
        before = self.binding
        if before is not None and before.is_current(groups, states, modules=modules):
            return before
        known = None if before is None else before.plan
        plan = Plan(self.model, parameters(groups), self.form, self.chosen, known)
        binding = Binding(plan, groups, states)
        if before is not None:
            if not plan.layers and self.form.has_g:
                raise ValueError(report.nothing_found(self.form.optimizer, binding))
            convert_state(binding)
        self.binding = binding.take_effect()
        self.capture.follow(plan.hooks)
        return binding

    def complete(
        self,
        binding: Binding,
        make_state: Callable[[Binding, Tensor, dict[str, Any], Group], None],
    ) -> Binding:
        """Create all state that is missing, in the first step and after parameters were added."""
        # All entries are created at once, so that a checkpoint has the same keys on every rank and
        # at every time. They are not created with the optimizer, because wrappers may replace the
        # parameters after that.
        for group in binding.groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    state = binding.states[parameter]
                    # torch.distributed.checkpoint reports a parameter without state as missing
                    state.setdefault("preconditioned", int(id(parameter) in binding.shares_of))
                    make_state(binding, parameter, state, group)
        binding = Binding(binding.plan, binding.groups, binding.states, complete=True)
        self.binding = binding.take_effect()
        for layer in binding.plan.layers.values():
            layer.make_state()
        binding.note_state()
        return binding

    @property
    def processes(self) -> Processes:
        """The processes that train together at this time."""
        group: Any = self.distributed.process_group
        available = dist.is_available() and dist.is_initialized() and group is not False
        if self.binding is None or not available or dist.get_world_size(group) == 1:
            return SINGLE_PROCESS
        plan = self.binding.plan
        divided: list[Any] = [p for p, shards in plan.sharded.values() if shards is not None]
        mesh = divided[0].device_mesh if divided else None
        group = dist.group.WORLD if group is None else group
        return DataParallel(group, plan.device, self.distributed.communication_dtype, mesh)

    def listen(self) -> None:
        """Register the hooks that the next step needs."""
        self._heard = self.binding
        self.capture.listen()

    def load(
        self,
        optimizer: torch.optim.Optimizer,
        load_plainly: Callable[[dict[str, Any]], None],
        state_dict: dict[str, Any],
    ) -> None:
        """Load a state dict with factors; if an error is raised, nothing has changed."""
        before = self.current(optimizer.param_groups, optimizer.state)

        def adopt(group: Group, present: Group) -> None:
            if CALLABLE in (as_saved(present["update_interval"]), group["update_interval"]):
                group["update_interval"] = present["update_interval"]
            group["update_interval"] = as_interval(group["update_interval"])

        def complete() -> None:
            binding = Binding(before.plan, optimizer.param_groups, optimizer.state)
            self.binding = binding.take_effect()
            fit_to_layers(binding, self.processes, relative=self.form.relative_damping)

        try:
            load(optimizer, load_plainly, state_dict, adopt, complete)
        except BaseException:
            self.binding = before.take_effect()
            raise
        self.listen()

    # ---- the refresh -----------------------------------------------------------------------------

    def refresh(
        self, binding: Binding, loss_terms: LossTerms, loss_scale: Callable[[], float]
    ) -> None:
        """Take new factors for the layers that are due."""
        capture, processes = self.capture, self.processes
        due = [layer for layer in binding.plan.layers.values() if layer in capture.gathering]
        try:
            number, scale = self._agreed(binding, due, processes, loss_terms, loss_scale)
            if processes.count > 1:
                count_rows(processes, due, capture.reached)
            for layer in due if scale != 1.0 else ():
                layer.statistics.scale_gradients_(scale)
            unreached = set(due) - capture.reached
            unseen = with_gradient(unreached) if unreached else unreached
            events = refresh(
                [c for layer in due if (c := self._candidate(layer, number)) is not None],
                self.warnings.note,
                relative=self.form.relative_damping,
                processes=processes,
            )
        except BaseException:  # the statistics may be partly scaled, or summed over processes
            capture.discard()
            raise
        for layer in due:
            if layer in unseen & capture.awaited:
                self.warnings.note(_WITHOUT_STATISTICS, layer.name)
        capture.finish_refresh(due, events, unseen)
        for group in binding.groups if number else ():
            group["last_loss_terms"] = number
        self.last_refresh, self._heard, binding.made = events, None, None

    def _agreed(
        self,
        binding: Binding,
        due: Sequence[LayerCurvature],
        processes: Processes,
        loss_terms: LossTerms,
        loss_scale: Callable[[], float],
    ) -> tuple[int, float]:
        """Return N of all processes, and what makes captured gradients those of one loss term."""
        error, number, scale, facts, capture = None, 0, 1.0, [], self.capture
        try:  # an error is raised on every process
            self._upcoming = next_refreshes(binding)
            if capture.row_mask is not None and capture.reached and not capture.mask_taken:
                raise RuntimeError(_WRONG_MASK.format(tuple(capture.row_mask.shape)))
            number = self._loss_terms(loss_terms)
            if self.form.has_g and capture.sampler is None:  # else of loss terms already
                # of this process, whose loss is its own mean
                is_mean = self.form.loss_reduction == "mean" and number > 0
                scale = (number if is_mean else 1) / (loss_scale() if capture.reached else 1.0)
            facts = list(self._facts(binding, due)) if processes.count > 1 else []
        except Exception as problem:
            if processes.count == 1:
                raise
            error = problem
        if processes.count > 1:
            number = int(sum(each[0] for each in agree(processes, error, facts, [number])))
        return number, scale

    def _facts(self, binding: Binding, due: Sequence[LayerCurvature]) -> Iterator[str]:
        """Yield lines of text that must be the same on all processes."""
        form, distributed, sampler = self.form, self.distributed, self.capture.sampler
        yield f"loss_reduction={form.loss_reduction!r}, fisher={form.fisher!r}"
        yield f"{distributed.whole_matrices=}, {distributed.communication_dtype=}"
        yield f"sampled labels: {sampler is not None and sampler.passes > 0}"
        for i, group in enumerate(binding.groups):
            for name in _COMPARED:
                value = group.get(name)
                value = float(value) if isinstance(value, Tensor) else value
                yield f"parameter group {i}: {name}={value!r}"
            # with other intervals one rank would wait in a refresh that the others do not take
            yield f"parameter group {i}: the next refresh is step {self._upcoming[i]}"
        for layer in due:
            weight = layer.weight
            yield (
                f"layer {layer.name!r}: {[f.layout.block_sizes for f in layer.stored]}, "
                f"{weight.dtype}, refreshes={layer.refreshes}, gradient={weight.grad is not None}"
            )

    def _loss_terms(self, loss_terms: LossTerms) -> int:
        """Return N, the number of loss terms of this process; 0 if it is not needed."""
        given: Any = loss_terms() if callable(loss_terms) else loss_terms
        if given is not None:
            given = given.item() if isinstance(given, Tensor) else given
            if not whole_number(given):
                raise ValueError(f"loss_terms={given!r}: must be a whole number ≥ 1, or None")
            return int(given)
        if self.capture.sampler is not None:
            return self.capture.sampler.loss_terms
        if not self.form.has_g:
            return 0
        number, differing = loss_terms_of_step(self.capture.passes.values())
        if differing is not None:
            self.warnings.note(_DIFFERING.format(*differing))
        return number

    def _candidate(self, layer: LayerCurvature, loss_terms: int) -> Candidate | None:
        """Return new factors of a layer, in the memory of its statistics; None without rows."""
        options, rows, group_rows = (
            layer.weight_view.options,
            layer.statistics.rows,
            layer.statistics.group_rows,
        )
        factors = None if layer.weight.grad is None else layer.statistics.take(loss_terms)
        if factors is None:
            return None
        group_rows_per_term = None
        if group_rows and layer.g is not None:
            before = layer.state[layer.prefix + "group_rows_per_term"]
            now = to_device(group_rows, before.device, before.dtype) / loss_terms
            group_rows_per_term = torch.where(now > 0, now, before)
        return Candidate(
            layer,
            options["step"],
            factors,
            # T weights the product of A and G, so it is 1 for a layer without G
            rows_per_term=rows / loss_terms if len(factors) > 1 and not group_rows else 1.0,
            damping=float(options["damping"]),
            thresholds=options.get("trace_thresholds"),
            decay=float(options.get("factor_decay", 0.0)),
            group_rows_per_term=group_rows_per_term,
            without_rows=[not count for count in group_rows] if layer.refreshes else [],
        )

    # ---- the end of a step -----------------------------------------------------------------------

    def finish(self, binding: Binding) -> None:
        """Count the step, and let the layers listen that the next step refreshes."""
        changed, self.capture.scaler_stepped = self._heard is not binding, False
        if self._heard is not None:
            self.last_refresh, self._upcoming = (), next_refreshes(binding)
            if self.capture.gathering:
                changed |= self.capture.finish_step()
        for group, upcoming in zip(binding.groups, self._upcoming, strict=True):
            group["step"], group["next_refresh"] = group["step"] + 1, upcoming
            if group["step"] >= upcoming:
                for layer in binding.plan.layers.values():
                    if layer.weight_view.options is group:
                        layer.record(**vars(when_interval_ends(layer.life)))
                changed = True
        if changed:
            self._heard = binding
            self.capture.listen()
        if self.warnings.pending:
            self.warnings.issue()


# the options and counters of groups that must be the same on all processes; the interval may be a
# function, so what it returns is compared
_COMPARED = [
    name
    for name in (*scoped("group"), *COUNTERS)
    if name not in ("update_interval", "last_loss_terms")
]


def next_refreshes(binding: Binding) -> list[int]:
    """Return for each group the step of its next refresh as of the end of this step."""
    steps = []
    for group in binding.groups:
        step, at = group["step"], group["next_refresh"]
        if step >= at:
            interval = group["update_interval"]
            at = step + (
                check_interval(f"update_interval({step})", interval(step))
                if callable(interval)
                else interval
            )
        steps.append(at)
    return steps


_WRONG_MASK = (
    "row_mask of shape {} fits no layer: it must have the leading dimensions of the layers' "
    "inputs, (N, L); set it before each forward pass, and to None where there is no padding"
)
_WITHOUT_STATISTICS = (
    "it has a gradient and no statistics, so it keeps the factors that it has, or takes the step "
    "without, until statistics come in a later refresh. The usual causes: its weight is used "
    "without calling the module; the gradients come from torch.autograd.grad, torch.func, "
    "torch.nn.DataParallel or a copy of the model; zero_grad() or load_state_dict() came between "
    'loss.backward() and step(); or, with fisher="sampled", sample_fisher() was not called with '
    "what the model returned. layers= leaves it out"
)
_DIFFERING = (
    "N = {0} is taken for the number of loss terms of a backward pass, the leading dimension of "
    "the first layer's input, while the last layer's input has {1}. If the loss averages over "
    "another number (predicted tokens, groups of rows), set optimizer.loss_terms; {0} confirms it"
)
