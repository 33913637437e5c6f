"""What the optimizers share: groups, state dicts, and steps that torch.compile leaves out.

THOR and ThorMuon share construction, step, refresh of the layers' curvature, and reports.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torch_thor.capture.coverage import Coverage
from torch_thor.curvature.blocks import ieee_float32
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.distributed.options import Distributed
from torch_thor.intervals import as_interval, as_saved
from torch_thor.optim import report, trained
from torch_thor.optim.batches import Binding
from torch_thor.optim.gradients import creates_state_only
from torch_thor.optim.model_argument import Closure, Group, check_known, parameters_of_model
from torch_thor.optim.options import COUNTERPARTS, COUNTERS, OPTIONS, check, options_in, scoped
from torch_thor.optim.plan import Form
from torch_thor.optim.preconditioner import LossTerms, Preconditioner
from torch_thor.torch_internals import uncompiled


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer whose options are checked when they are given, and whose groups are plain."""

    def _check_group(self, group: Group) -> None:
        """Raise ValueError for an option that is out of range."""
        check({name: group[name] for name in self.defaults if name in group})

    def _take(self, group: Group) -> None:
        """Take a group that was added, or raise an error for parameters that do not fit."""

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``; it is copied.

        Raises:
            ValueError: an option is out of range, or a parameter is not in the model.
            TypeError: it is no dict.
        """
        before = len(self.param_groups)
        group = {**self.defaults, **param_group}
        self._check_group(group)
        if "update_interval" in group:
            group["update_interval"] = as_interval(group["update_interval"])
        super().add_param_group(group)
        try:
            self._take(self.param_groups[-1])
        except BaseException:
            del self.param_groups[before:]
            raise


class CurvatureOptimizer(CheckedOptimizer):
    """A base class of optimizers that precondition layers with Kronecker factors.

    A subclass defines ``_update``, and ``_make_parameter_state`` if its update has a state. Its
    constructor hands on the model and its ``locals()``, in which are the options that
    ``torch_thor.optim.options`` declares.

    Attributes:
        loss_terms: N, the number of terms that the loss of one step averages over, all
            micro-batches together: a number, a callable that returns it, or None for the number of
            samples (the leading dimension of the first layer's input) in each backward pass, summed
            over the passes of a step. Set it if the loss averages over something else (tokens,
            padding), or if the batch is another dimension.
        grad_scaler: the gradient scaler, or None. THOR needs it, to know the scale of the
            gradients that its layers see on refresh steps.
    """

    # the factors that it uses, and how it trains what has none
    form: ClassVar[Form] = Form("plain momentum")
    # the learning rate where none is given, of a network that is not trained already; None if a
    # rate must be given
    usual_lr: float | None = None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse a keyword of another optimizer by naming its counterpart."""
        for name in given.keys() & COUNTERPARTS.keys():
            raise TypeError(f"{cls.__name__} has no {name}=: {COUNTERPARTS[name]}")
        return super().__new__(cls)

    def __init__(
        self, params: nn.Module | Iterable[Any], model: nn.Module | None, given: Mapping[str, Any]
    ) -> None:
        label = type(self).__name__
        params, model = parameters_of_model(params, model, label)
        if self.usual_lr is not None:
            lr = given["lr"]
            found = {"lr": self.usual_lr if lr is None else lr, "auto_lr": lr is None}
            given = {**given, **found, "trained": None}
        options = options_in(given)
        more = {name: given.get(name, OPTIONS[name].default) for name in scoped("optimizer")}
        check({**options, **more, "layers": None})  # they are selected in the model
        form = replace(
            self.form,
            optimizer=type(self),
            loss_reduction=more["loss_reduction"],
            fisher=more["fisher"],
            row_splits=more["row_splits"],
        )
        distributed = more["distributed"] or Distributed()
        self._curvature = Preconditioner(model, form, more["layers"], distributed)
        self.loss_terms: LossTerms = None
        self.grad_scaler: Any = None
        super().__init__(params, options | COUNTERS)
        binding = self._binding()
        self._curvature.listen()
        entries = self.coverage()
        used = any(e.preconditioned and e.trained for e in entries)
        if not used and (form.has_g or not any(entry.trained for entry in entries)):
            raise ValueError(report.nothing_found(type(self), binding))
        report.warn_of_little(entries, label)

    # what is read only at construction
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

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:
        """Take one step: refresh the layers that are due, precondition, update.

        Args:
            closure: evaluates the model again and returns the loss; called first, with gradients
                enabled.

        Returns:
            The closure's loss, or None.

        Raises:
            FloatingPointError: new statistics hold NaN or inf; nothing has changed.
            RuntimeError: the state does not fit; nothing has changed.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        is_for_state = not self.state and creates_state_only(self.param_groups)
        curvature, is_refresh = self._curvature, bool(self._curvature.capture.awaited)
        # the plan, for the groups and the state as they are
        binding = curvature.current(self.param_groups, self.state, modules=is_refresh)
        if not binding.complete:
            binding = self._complete(binding)
        if is_for_state:
            return loss
        if is_refresh:
            curvature.refresh(binding, self.loss_terms, self._loss_scale)
        with ieee_float32(*binding.device_types):
            self._update(binding)
        curvature.finish(binding)
        return loss

    def _complete(self, binding: Binding) -> Binding:
        """Make the state that is missing, and decide on learning rates that are not given."""
        binding = self._curvature.complete(binding, self._make_parameter_state)
        if self.usual_lr is not None:
            rates = trained.decide(binding, self._curvature.processes, alike=self.form.has_g)
            binding.note_state()
            if rates:
                text = f"{rates}. Give lr=... for a rate that counts as it is"
                self._curvature.warnings.note(text)
        return binding

    def _update(self, binding: Binding) -> None:
        """Update every parameter with a gradient."""
        raise NotImplementedError

    def _make_parameter_state(
        self, binding: Binding, parameter: Tensor, state: dict[str, Any], group: Group
    ) -> None:
        """Add the entries of the update that the state of a parameter lacks; none by default."""

    def _loss_scale(self) -> float:
        """Return the factor of the gradients that layers have seen."""
        if self.grad_scaler is not None:
            return float(self.grad_scaler.get_scale())
        if self._curvature.capture.scaler_stepped:
            raise RuntimeError(
                "a GradScaler takes the steps, and the gradients that layers saw have its scale: "
                "set optimizer.grad_scaler = scaler once, before the first step"
            )
        return 1.0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler reads this in each of its steps; it unscales gradients and skips steps itself
        self._curvature.capture.scaler_stepped = True
        return False

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop their statistics.

        Statistics of a backward pass that is still to come stay.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.
        """
        capture = self._curvature.capture
        if capture.awaited and (capture.sampler is None or capture.sampler.trained):
            capture.discard()
        super().zero_grad(set_to_none)

    # ---- groups, plan and state ------------------------------------------------------------------

    def _binding(self, *, modules: bool = True) -> Binding:
        """Return the plan, bound to the groups and the state as they are now."""
        return self._curvature.current(self.param_groups, self.state, modules=modules)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with options of their own.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``. Its ``lr`` counts as it
                is, and so does the optimizer's; without a rate, see ``lr`` of the class.

        Raises:
            ValueError: an option is out of range, or a parameter is not in the model.
            TypeError: it is no dict.
        """
        group = dict(param_group)
        if self.usual_lr is not None:
            group = {key: value for key, value in group.items() if key != "lr" or value is not None}
            group.setdefault("auto_lr", self.defaults["auto_lr"] and "lr" not in group)
        super().add_param_group(group)

    def _take(self, group: Group) -> None:
        check_known(group["params"], self.model)
        if self._curvature.binding is not None:
            self._binding()
            self._curvature.listen()

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers, strings, and dicts of them.

        Hooks that are registered for it see this form.

        Returns:
            As ``torch.optim.Optimizer.state_dict``.
        """
        handle = self.register_state_dict_post_hook(_save_intervals, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if it raises an error, nothing has changed.

        Args:
            state_dict: a result of ``state_dict``. ``update_interval`` keeps its value if it is a
                function here or in the run that was saved, because state dicts contain no
                functions; schedules of ``torch_thor.intervals`` are loaded like any other option.

        Raises:
            ValueError: it is the state dict of another optimizer; it has other groups or
                parameters, or tensors of other shapes; it lacks factors of layers that are
                preconditioned here; or it holds an option that is out of range, or an unknown
                schedule.
        """
        self._curvature.load(self, super().load_state_dict, state_dict)

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
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(
                f"row_mask={mask.dtype} {tuple(mask.shape)}: must be a bool tensor (N, L), True "
                "for the rows that count; use attention_mask.bool()"
            )
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
        text = report.described(self)
        if any(group.get("auto_lr") for group in self.param_groups):
            text += f"\nlr=None: {trained.described(self._binding())}"
        return text


def _save_intervals(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        group["update_interval"] = as_saved(group["update_interval"])
