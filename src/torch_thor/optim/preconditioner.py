"""A model's curvature for an optimizer: which layers there are, their statistics and refreshes.

A :class:`Preconditioner` never sees the optimizer. It is given groups, state and what the user has
set, and returns values: a :class:`torch_thor.optim.plan.Binding`, which the update reads, and the
:class:`torch_thor.optim.inputs.StepInputs` of a step.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from torch_thor.capture.gathering import Capture, loss_terms_of_step
from torch_thor.capture.patterns import Patterns
from torch_thor.curvature.blocks import has_values, to_device
from torch_thor.curvature.communication import SINGLE_PROCESS, Processes
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.lifecycle import Life, when_interval_ends
from torch_thor.curvature.refresh import Candidate, RefreshEvent, refresh
from torch_thor.distributed.agreement import NUMBERS, agree, check_same_gradients, count_rows
from torch_thor.distributed.data_parallel import DataParallel
from torch_thor.distributed.options import Distributed
from torch_thor.distributed.partitioned import partition
from torch_thor.optim import report
from torch_thor.optim.check import Check, accelerator_of
from torch_thor.optim.inputs import (
    CheckedOptions,
    StepInputs,
    StepRequest,
    check_split,
    facts_of_groups,
    largest_gradient,
    next_refreshes,
    nonfinite_message,
)
from torch_thor.optim.learned import Look
from torch_thor.optim.missing import layers_without_statistics
from torch_thor.optim.model_argument import Group, States, parameters_with_gradient
from torch_thor.optim.options import check
from torch_thor.optim.plan import Binding, Form, Plan, parameters
from torch_thor.optim.state_dict import convert_state


class Preconditioner:
    """The curvature of the layers of a model."""

    def __init__(
        self, model: nn.Module, form: Form, chosen: Patterns, distributed: Distributed
    ) -> None:
        self.model, self.form, self.chosen, self.distributed = model, form, chosen, distributed
        self.capture = Capture(sampled=form.fisher == "sampled")
        self.warnings = report.StepWarnings(form.optimizer)
        self.options = CheckedOptions(form.optimizer, form.options)
        self.last_refresh: tuple[RefreshEvent, ...] = ()
        self.binding: Binding | None = None  # the plan as it was found and bound last
        self._heard: Binding | None = None  # the one for which hooks are registered

    # ---- the plan --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What is known of the model, as it was found last."""
        assert self.binding is not None
        return self.binding.plan

    def current(self, groups: list[Group], states: States, *, modules: bool = True) -> Binding:
        """Return the plan as it is bound now: the same object unless something was replaced.

        Raises:
            ValueError: no layer is left to precondition; weights and state are as before.
        """
        before = self.binding
        if before is not None and before.is_current(groups, states, modules=modules):
            return before
        known, owners = (None, {}) if before is None else (before.plan, before.owners)
        plan = Plan(self.model, parameters(groups), self.form, self.chosen, known)
        binding = Binding(plan, groups, states, owners)
        if before is not None:
            if not plan.layers and self.form.has_g:
                raise ValueError(report.nothing_found(self.form.optimizer, binding))
            convert_state(binding)
            self.warnings.note_changes(before.plan, plan)
        self.binding = binding.take_effect()
        for layer in plan.layers.values():
            layer.statistics.follow_weight()
        self.capture.follow(self.model, plan.hooks)
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

    def listen_again(self, *, loaded: bool = False) -> None:
        """Register other hooks between two steps, because groups or the state have changed."""
        self._heard = self.binding
        self.capture.listen_again(loaded=loaded)

    # ---- what a step reads -----------------------------------------------------------------------

    def read(self, groups: list[Group], states: States, request: StepRequest) -> StepInputs:
        """Update the plan, read and check a step's inputs, and agree on them among processes."""
        processes = self._deciding(groups, request)
        if processes.count == 1:
            return self._read(groups, states, request, processes)
        inputs, error, facts, numbers = None, None, [], [0.0] * NUMBERS
        try:
            inputs = self._read(groups, states, request, processes)
            facts = [*self._facts(request), *facts_of_groups(inputs)]
            numbers = [inputs.loss_terms, inputs.skip, inputs.nonfinite, inputs.largest]
        except Exception as problem:  # it is raised on every process
            error = problem
        loss_terms, skip, nonfinite, largest = zip(
            *agree(processes, error, facts, numbers), strict=True
        )
        assert inputs is not None  # agree() raises the error of this process
        if any(skip):
            return replace(inputs, skip=True, nonfinite=any(nonfinite))
        check_same_gradients(largest)
        return replace(inputs, loss_terms=int(sum(loss_terms)))

    def _deciding(self, groups: list[Group], request: StepRequest) -> Processes:
        """Return the processes that agree on this step."""
        # Processes agree on refreshes; and on every step if the update sends something, because one
        # that raises or skips leaves the others waiting, or if a step may be skipped, because that
        # process would refresh later.
        assert self.binding is not None
        sends = self.distributed.divide_curvature
        if self.binding.plan.first_shards is not None:
            sends |= self.distributed.whole_matrices or any(g.get("kl_clip") for g in groups)
        if not (self.capture.awaited or sends or request.nonfinite == "skip") or request.state_only:
            return SINGLE_PROCESS
        return self.processes

    def _facts(self, request: StepRequest) -> list[str]:
        """Return lines of text that must be the same on all processes."""
        form, distributed, sampler = self.form, self.distributed, self.capture.sampler
        facts = [
            f"loss_reduction={form.loss_reduction!r}, fisher={form.fisher!r}",
            # with 'skip' ranks agree on every step, not on refreshes alone
            f"nonfinite={request.nonfinite!r}",
            f"divide_curvature={distributed.divide_curvature}, "
            f"whole_matrices={distributed.whole_matrices}",
            f"communication_dtype={distributed.communication_dtype}",
        ]
        if sampler is not None:
            facts.append(f"sampled labels: {'yes' if sampler.passes else 'no'}")
        return facts

    def _read(
        self, groups: list[Group], states: States, request: StepRequest, processes: Processes
    ) -> StepInputs:
        """Return the inputs of this process, whose options, state and gradients can be used."""
        capture = self.capture
        self.options.check(groups)
        self.options.check_values({"nonfinite": request.nonfinite}, ("nonfinite",))
        binding = self.current(groups, states, modules=bool(capture.awaited))
        due = self._due(binding)
        known = binding, due, processes, next_refreshes(binding)
        scale = None if request.scale is None else request.scale()
        if scale is not None and scale.found_inf:
            return StepInputs(*known, skip=True)
        loss_terms, of_outputs = self._loss_terms(request, due), 1.0
        # then captured gradients are those of single loss terms already
        sampled = capture.sampler is not None
        if scale is not None:
            if not sampled and self.form.has_g and any(layer.statistics.rows for layer in due):
                of_outputs = scale.of_outputs()
            scale.unscale_(gradient for _, _, gradient in parameters_with_gradient(groups))
        later = None if processes.count > 1 else self._check_later(binding, request, due)
        largest = 1.0 if later is not None else largest_gradient(groups, binding.plan)
        if not math.isfinite(largest):
            if request.nonfinite == "skip":
                return StepInputs(*known, skip=True, nonfinite=True)
            raise FloatingPointError(nonfinite_message(binding))
        self._check_mask(due)
        is_mean = self.form.loss_reduction == "mean" and loss_terms > 0 and not sampled
        if binding.plan.first_shards is not None:
            largest = 0.0  # every process has other rows, whose gradients differ
        return StepInputs(
            *known,
            loss_terms,
            output_scale=(loss_terms if is_mean else 1) / of_outputs,
            largest=largest,
            check=later,
            found_inf=None if later is None else later.found_inf,
        )

    def _check_later(
        self, binding: Binding, request: StepRequest, due: Sequence[LayerCurvature]
    ) -> Check | None:
        """Return the check of gradients on an accelerator that need not be waited for."""
        first = next(
            (p for group in binding.groups for p in group["params"] if p.grad is not None), None
        )
        # rows that processes divide have other gradients on each, and would need another process's
        # check
        if (
            first is None
            or first.device.type == "cpu"
            or binding.plan.sharded
            or (due and request.nonfinite == "skip")
        ):
            return None
        gradients = [(p, g) for _, p, g in parameters_with_gradient(binding.groups) if g.numel()]
        if accelerator_of(gradients) is None:
            return None
        return Check(gradients, min(float(group["damping"]) for group in binding.groups))

    def _due(self, binding: Binding) -> list[LayerCurvature]:
        """Return the layers that refresh in this step."""
        # one that was made just now gathers nothing yet
        gathering = self.capture.gathering if self.capture.awaited else ()
        due = [layer for layer in binding.plan.layers.values() if layer in gathering]
        for layer in due:
            check_split(layer)
        return due

    def _loss_terms(self, request: StepRequest, due: Sequence[LayerCurvature]) -> int:
        """Return N, the number of loss terms of this process; 0 if it is not needed."""
        given = request.loss_terms() if callable(request.loss_terms) else request.loss_terms
        if given is not None:
            check(self.form.optimizer, {"loss_terms": given})
            return int(given)
        if not (due and self.form.has_g):
            return 0
        if self.capture.sampler is not None:
            return self.capture.sampler.loss_terms
        loss_terms, uncertain = loss_terms_of_step(self.capture.passes.values())
        if uncertain is not None:
            label = self.form.optimizer.__name__
            self.warnings.note("loss terms", _UNCERTAIN.format(*uncertain, label=label))
        return loss_terms

    def _check_mask(self, due: Sequence[LayerCurvature]) -> None:
        mask = self.capture.row_mask
        if (
            due
            and mask is not None
            and not self.capture.mask_taken
            and any(layer.statistics.rows for layer in due)
        ):
            self.capture.discard()
            raise RuntimeError(
                f"row_mask of shape {tuple(mask.shape)} fits no layer: it must have the leading "
                "dimensions of the layers' inputs, (N, L); set it before each forward pass, and "
                "to None where there is no padding"
            )

    # ---- the refresh -----------------------------------------------------------------------------

    def refresh(
        self,
        inputs: StepInputs,
        make_state: Callable[[Binding, Tensor, dict[str, Any], Group], None],
        look: Callable[[Binding], Look | None],
        *,
        state_only: bool,
    ) -> Binding:
        """Create missing state, take new factors for the layers that are due, and bind the plan."""
        binding, due, capture = inputs.binding, inputs.due, self.capture
        if binding.complete and not due:
            return binding
        try:
            without_statistics, looked = self._pool(inputs, state_only=state_only), None
            if not binding.complete:
                binding = self._completed(binding, make_state, divides=not state_only)
                looked = look(binding)
            if due and not state_only:
                is_first = not any(layer.refreshes for layer in binding.plan.layers.values())
                candidates = self._candidates(due, inputs.loss_terms)
                try:
                    self.last_refresh = refresh(
                        candidates,
                        self.warnings.note_layer,
                        relative=self.form.relative_damping,
                        processes=inputs.processes,
                        found_inf=inputs.found_inf,
                        beside=looked,
                    )
                except FloatingPointError as error:
                    raise FloatingPointError(nonfinite_message(binding)) from error
                binding = binding.refreshed()
                if is_first and inputs.loss_terms > 1:
                    self._note_summed_loss(candidates, inputs.loss_terms)
                for layer, what in without_statistics:
                    self.warnings.note_layer(layer, what)
                capture.finish_refresh(
                    due, self.last_refresh, [layer for layer, _ in without_statistics]
                )
                for group in binding.groups if inputs.loss_terms else ():
                    dict.update(group, last_loss_terms=inputs.loss_terms)  # plain already
            if looked is not None:
                looked.take()
            self.binding = binding
        # the statistics may be partly scaled, or partly summed over processes
        except BaseException:
            capture.discard()
            raise
        return binding

    def _pool(self, inputs: StepInputs, *, state_only: bool) -> list[tuple[LayerCurvature, str]]:
        """Scale the sums of gradients, count all rows, and return the layers without statistics."""
        due, capture, scale = inputs.due, self.capture, inputs.output_scale
        if not due:
            return []
        # gradients of outputs become those of one loss term
        for layer in due if scale != 1.0 else ():
            for g_sum in layer.statistics.sums()[1:] if layer.statistics.rows else ():
                # in two products, because scale² can overflow float32 if the loss is scaled for
                # half precision
                g_sum.rows.mul_(scale).mul_(scale)
        if inputs.processes.count > 1:
            count_rows(inputs.processes, due, capture.reached, capture.inside_transform)
        if state_only or capture.reached.issuperset(due):
            return []
        return layers_without_statistics(inputs.binding.plan.layers.values(), capture)

    def _completed(
        self, binding: Binding, make_state: Callable[..., None], *, divides: bool
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
                    state.setdefault(
                        "preconditioned", int(id(parameter) in binding.layer_parameters_of)
                    )
                    make_state(binding, parameter, state, group)
        owners = binding.owners
        if self.distributed.divide_curvature and divides:
            new = [layer for layer in binding.plan.layers.values() if layer not in owners]
            owners = owners | partition(new, self.processes)
        binding = Binding(
            binding.plan, binding.groups, binding.states, owners, complete=True
        ).take_effect()
        for layer in binding.plan.layers.values():
            layer.make_state()
        return binding

    def _candidates(self, layers: Sequence[LayerCurvature], loss_terms: int) -> list[Candidate]:
        """Return a candidate for each layer that has rows."""
        # The memory of its statistics becomes that of its factors.
        candidates = []
        for layer in layers:
            options, rows = layer.weight_view.options, layer.statistics.rows
            if layer.weight.grad is None:
                continue
            group_rows, group_rows_per_term = layer.statistics.group_rows, None
            if group_rows and layer.g is not None:
                before = layer.state[layer.prefix + "group_rows_per_term"]
                now = to_device(group_rows, before.device, before.dtype) / loss_terms
                group_rows_per_term = torch.where(now > 0, now, before)
            factors = layer.statistics.take(loss_terms)
            if factors is None:
                if layer in self.capture.reached:
                    then = (
                        "its old inverses stay" if layer.refreshes else "it gets its plain gradient"
                    )
                    self.warnings.note_layer(
                        layer, f"it saw no rows (an empty batch, or every row masked): {then}"
                    )
                continue
            thresholds = options.get("trace_thresholds", self.form.trace_thresholds)
            candidates.append(
                Candidate(
                    layer,
                    options["step"],
                    factors,
                    # T weights the product of A and G, so it is 1 for a layer without G
                    rows_per_term=rows / loss_terms if len(factors) > 1 and not group_rows else 1.0,
                    damping=float(options["damping"]),
                    thresholds=(float(thresholds[0]), float(thresholds[1])),
                    decay=float(options["factor_decay"]),
                    group_rows_per_term=group_rows_per_term,
                    without_rows=[not count for count in group_rows] if layer.refreshes else [],
                    has_numbers=has_values(factors[0].rows),
                )
            )
        return candidates

    def _note_summed_loss(self, candidates: Sequence[Candidate], loss_terms: int) -> None:
        """Warn of a loss that looks like a sum over the batch although it is to be a mean."""
        # N² times too large a Fisher matrix makes damping void and the natural gradient N times too
        # short
        form = self.form
        if not form.has_g or form.loss_reduction == "sum" or form.fisher == "sampled":
            return
        # the mean square of the output gradients of each layer
        squares = []
        for candidate in candidates:
            kind = candidate.layer.kind
            # a row of routed experts belongs to one group
            groups = 1 if kind.has_own_rows else kind.groups
            squares.append(max(0.0, math.fsum(candidate.traces[1])) / (groups * kind.outputs))
        if not squares:
            return
        middle = math.sqrt(statistics.median_low(squares))
        is_large = middle > max(_MEDIAN_OF_A_SUM, _MEDIAN_PER_TERM * loss_terms)
        if is_large and math.sqrt(max(squares)) <= _LARGEST_PER_TERM * loss_terms:
            self.warnings.note(
                "summed loss",
                f"{form.optimizer.__name__}: the gradients are so large that the loss looks like a "
                f"sum over the {loss_terms} loss terms of the batch, not their mean; pass "
                'loss_reduction="sum", or average the loss over the batch. If it is an average, '
                "bring its targets to a scale of about 1",
            )

    # ---- the end of a step -----------------------------------------------------------------------

    def finish(self, inputs: StepInputs) -> dict[LayerCurvature, Life]:
        """Register the hooks that the next step needs.

        They are those of the layers that it refreshes, or that were reached again.

        Returns:
            The lives of layers that have changed, as they were before.
        """
        changed, before = self._heard is not self.binding or bool(inputs.due), {}
        if not inputs.due and self.capture.gathering:
            before = self.capture.finish_step()
        for group in inputs.binding.groups:
            if group["step"] >= group["next_refresh"]:
                for layer in inputs.binding.plan.layers.values():
                    if layer.weight_view.options is group:
                        life = layer.life
                        before.setdefault(layer, life)
                        layer.record(**vars(when_interval_ends(life)))
                changed = True
        if changed or before:
            self.listen()
        if self.warnings.pending:
            self.warnings.issue()
        return before


_UNCERTAIN = (
    "{label} takes N = {0} for the number of loss terms of a backward pass, from the leading "
    "dimension of the layers' inputs, while the last layer's input has {1}. If the loss averages "
    "over another number (predicted tokens, groups of rows), set optimizer.loss_terms; {0} "
    "confirms this one"
)

# RMS output gradients of a sum that is given as a mean: in the median layer, and relative to N.
# Those of a mean of log-likelihoods or of standardised squared errors are about 1 or less in every
# layer, those of the sum N times that.
_MEDIAN_OF_A_SUM, _MEDIAN_PER_TERM, _LARGEST_PER_TERM = 10.0, 0.05, 3.0
