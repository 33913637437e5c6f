"""Adding parameter groups to THOR, saving and loading its state dict, copying and pickling it."""

from typing import Any

from torch import nn

from torch_thor.optim.checkpoint import (
    check_moments,
    complete_groups,
    load_checked,
    options_of,
    restore_tensors,
    restored_on_error,
)
from torch_thor.optim.consolidation import Consolidation
from torch_thor.optim.gradient_checks import some
from torch_thor.optim.saved_rows import fit_loaded_rows
from torch_thor.optim.state_dict_checks import check_factors, check_is_of_thor, check_selection
from torch_thor.optim.stored_intervals import loaded_interval, plain_group
from torch_thor.optim.thor_options import check_group, check_scaling, with_defaults
from torch_thor.optim.update_rule import UpdateRule

# The attributes that are copied and pickled beside groups and state. Layers and hooks are found again on the model.
_COPIED = (
    "model",
    "scaling",
    "fisher",
    "decay_filter",
    "loss_reduction",
    "loss_terms",
    "nonfinite",
    "whole_matrices",
    "divide_curvature",
    "communication_dtype",
    "grad_scaler",
    "skipped_steps",
    "skip",
    "only",
    "_group_handle",
    "_given",
)


class Persistence(Consolidation):
    """The part of THOR that saves, loads and copies it, and adds parameter groups."""

    model: nn.Module
    scaling: str | None
    _given: dict[str, Any]
    _rule: UpdateRule
    _fitting: list[Any] | None

    def _reset(self) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with options of their own.

        Args:
            param_group: as for :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option is out of range, or a parameter is not in the model.
        """
        of_others = {"loss_scale": self.param_groups[0]["loss_scale"]} if self.param_groups else {}  # one loss for all
        complete = with_defaults({**self._given, **of_others, **param_group}, self.scaling)
        check_scaling([complete], self.scaling)
        check_group(complete)
        param_group.update(complete)
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            known = {id(p) for p in self.model.parameters()}
            unknown = [str(tuple(p.shape)) for p in self.param_groups[-1]["params"] if id(p) not in known]
            if unknown:
                raise ValueError(
                    f"parameters of shape {some(unknown)} are not in the model, so THOR cannot see their layers run; "
                    f"pass the model that holds them, or give them an optimizer of their own"
                )
            if self._registry.is_found:
                self._registry.find(self.param_groups, self.state)
        except BaseException:
            del self.param_groups[before:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers and strings.

        Returns:
            As :meth:`torch.optim.Optimizer.state_dict`; a schedule of :mod:`torch_thor.intervals` is stored as text.
            Under FSDP2, tensors whose rows are divided are DTensors, as the parameters are.

        Raises:
            RuntimeError: the curvature is divided among processes (``divide_curvature=True``), and has not been
                collected by :meth:`consolidate_state_dict` since the last step.
        """
        with self._with_whole_state():
            state_dict = super().state_dict()
        return {**state_dict, "param_groups": [plain_group(group) for group in state_dict["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if it raises an error, nothing has changed.

        Args:
            state_dict: a result of ``state_dict()`` of THOR, in this version or an earlier one. Options that it does
                not contain keep their values. So does ``update_interval`` if it is a function here or in the run that
                was saved, because state dicts contain no functions; schedules of :mod:`torch_thor.intervals` are
                loaded like any other option.

        Raises:
            ValueError: it is the state dict of another optimizer; it has other groups or parameters, or tensors of
                other shapes; it was saved with another ``skip=`` or ``only=``; or it holds NaN or inf, an option that
                is out of range, or an unknown schedule.
        """
        registry = self._registry
        registry.index.update(self.param_groups, self.state)
        if registry.index.computed:
            registry.find(self.param_groups, self.state)
        own = options_of(self.param_groups)
        try:
            with self._undivided(), restored_on_error(self):
                saved = load_checked(self, super().load_state_dict, state_dict, check_is_of_thor)
                complete_groups(self.param_groups, own)
                for group, kept, given in zip(self.param_groups, own, saved["param_groups"], strict=True):
                    group["update_interval"] = loaded_interval(given, kept["update_interval"])
                    check_scaling([group], self.scaling)
                    check_group(group)
                restore_tensors(self.state, self.param_groups, saved)
                registry.index.update(self.param_groups, self.state)
                relative = self._rule.relative_damping
                fit_loaded_rows(self.state, self.param_groups, registry.index, relative=relative)
                check_selection(registry.layers.values(), registry.left_out, self.state)
                check_factors(registry.layers.values())
                check_moments(self.state, self.param_groups, registry.index.name)
        finally:
            registry.index.update(self.param_groups, self.state)
        self._fitting = None
        registry.capture.discard()
        registry.capture.resume()

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # copied or unpickled; load_state_dict calls this too, with state and groups only
            self._reset()
            self._registry.find(self.param_groups, self.state)
