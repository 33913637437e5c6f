"""THOR: the trace-based, layer-wise natural-gradient optimizer (Chen et al., AAAI 2021), for any PyTorch model.

One step reads as the algorithm does: the statistics were captured in forward and backward; refresh the layers that are
due; precondition; update with weight decay, clipping and momentum. What a layer's curvature is and how it is inverted
stands in :mod:`torch_thor.curvature`.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.capture import Capture
from torch_thor.curvature.coverage import Covered, survey, table
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.curvature.refresh import Candidate, refresh
from torch_thor.optim.options import UpdateInterval, check_group, check_interval, check_optimizer

DecayFilter = Callable[[str, nn.Parameter], bool]
LossTerms = int | Callable[[], int] | None


class THOR(torch.optim.Optimizer):
    """Natural gradient with Kronecker factors, refreshed layer by layer when their trace has changed.

    For every ``nn.Linear`` and ``nn.Conv2d``: ``ΔW = (1/T) · (G + √(λ/T) I)⁻¹ ∇W (A + √(λ/T) I)⁻¹`` with the empirical
    Fisher's factors A (input) and G (output gradient of one loss term); biases are solved with G alone. Then weight
    decay (``+ weight_decay · W``), clipping, and momentum as :class:`torch.optim.SGD` has it. Everything else (norms,
    embeddings, attention's fused projections, unknown modules) is trained by SGD with momentum; :meth:`coverage` lists
    what each parameter gets. The model is not changed, and the training loop is the usual one.

    Make it before wrapping or compiling the model: build the model, ``THOR(model)``, then DDP or ``torch.compile``.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``.
        model: the model, where ``params`` are parameters.
        lr: learning rate, a float or a one-element tensor. THOR's steps are natural-gradient steps: their length
            hangs on lr and damping together, and SGD's lr is no guide.
        damping: λ > 0; ``√(λ/T)`` is added to the diagonal of both factors. Schedule it like lr: it stands in every
            parameter group. Inverses have the damping of the refresh that made them.
        momentum: μ in [0, 1).
        nesterov: step along ``d + μ v`` instead of ``v``.
        weight_decay: added to the natural gradient as ``weight_decay · W`` (so it is not preconditioned).
        decay_filter: ``(name, parameter) -> bool``, which parameters decay; None: all.
        update_interval: steps between refreshes, or a callable from the step of a refresh (counted from 0) to the
            steps until the next. The first step refreshes.
        trace_thresholds: ``(ω1, ω2)``, section 3.2 of the paper: on a refresh a layer whose trace changed by more than
            ω1 takes new factors, by less than ω2 stops for good, else keeps what it has. ``(0, 0)`` takes them always.
        split_dim: block size of the factors (section 3.3), None for full factors.
        factor_decay: weight of the old factors in a running average; 0, as the paper has it, keeps the latest only.
        kl_clip: κ; scales the step of the preconditioned layers by ``min(1, √(κ / Σ lr² ⟨d, ∇⟩))`` (Ba et al., ICLR
            2017). None switches it off.
        loss_reduction: ``"mean"`` where the loss is the mean over the mini-batch's loss terms, ``"sum"`` where it is
            their sum.
        scaling: None; other values are not in this version.
        loss_terms: N, over how many terms the loss of ONE step averages (all micro-batches together): a number, a
            callable that returns it, or None for the leading dimension of the input of the first layer in each backward
            pass, summed over the passes of a step. Give it where that is not what the loss averages over (tokens,
            padding); ``optimizer.loss_terms = n`` may be set any time before ``step``.
        nonfinite: what a NaN or inf in a gradient does: ``"raise"`` FloatingPointError, or ``"skip"`` the step and count
            it in ``skipped_steps``. Either way nothing has changed.
        grad_scaler: the GradScaler, needed only if you call ``scaler.unscale_(optimizer)`` (to clip, say): then no
            other way is left to learn by how much the captured gradients are scaled.

    Raises:
        ValueError: an option is out of range, a parameter is not the model's, or nothing can be preconditioned.
        TypeError: ``params`` are parameters and ``model`` is missing.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.05,
        damping: float | Tensor = 0.03,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decay_filter: DecayFilter | None = None,
        update_interval: UpdateInterval = 100,
        trace_thresholds: tuple[float, float] = (0.01, 0.0),
        split_dim: int | None = 128,
        factor_decay: float = 0.0,
        kl_clip: float | None = None,
        loss_reduction: str = "mean",
        scaling: None = None,
        *,
        model: nn.Module | None = None,
        loss_terms: LossTerms = None,
        nonfinite: str = "raise",
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError(
                    "two models were given; pass THOR(model, ...) or THOR(parameters, model=model, ...)"
                )
            model, params = params, params.parameters()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model={model!r}: THOR reads the inputs of layers, so it must know the model; pass THOR(model, ...), "
                f"or THOR(parameters, model=model, ...)"
            )
        check_optimizer(loss_reduction, nonfinite, scaling)
        self.model = model
        self.decay_filter = decay_filter
        self.loss_reduction = loss_reduction
        self.loss_terms = loss_terms
        self.nonfinite = nonfinite
        self.grad_scaler = grad_scaler
        self.skipped_steps = 0
        self._capture: Capture | None = None
        self._layers: dict[str, LayerCurvature] = {}
        self._reported: set[tuple[str, str]] = set()
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
            "step": 0,  # the clock of the group, and the step of its next refresh: in the group, where DCP sees them
            "next_refresh": 0,
        }
        check_group(defaults)
        super().__init__(params, defaults)
        self._attach()

    # ---- what users look at -------------------------------------------------------------------------------------

    @property
    def curvature(self) -> Mapping[str, LayerCurvature]:
        """The preconditioned layers, by module name."""
        return MappingProxyType(self._layers)

    def coverage(self) -> list[Covered]:
        """List how each parameter of the model is trained.

        Returns:
            An entry a parameter, in the model's order: kind and factor sizes, or the reason why it has none.
        """
        return list(self._covered)

    def __repr__(self) -> str:
        covered = sum(math.prod(c.shape) for c in self._covered if c.preconditioned)
        total = sum(math.prod(c.shape) for c in self._covered)
        split = ", ".join(str(s) for s in dict.fromkeys(g["split_dim"] for g in self.param_groups))
        return (
            f"{super().__repr__()}\n{covered:,} of {total:,} parameters in {len(self._layers)} layers are "
            f"preconditioned:\n{table(self._covered, split)}"
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
            RuntimeError: a gradient is sparse, or captured gradients are scaled by an unknown factor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._index()
        if self._scaler_found_inf():
            self._discard_statistics()
            return loss
        largest = self._largest_gradient()
        if not math.isfinite(largest):
            self._refuse_nonfinite()
            return loss
        output_scale = self._output_scale()
        if self._materialise() and largest == 0 and all(float(g["lr"]) == 0 for g in self.param_groups):
            return (
                loss  # torch.distributed.checkpoint asks for the state in this way; it is no step of training
            )
        self._unscale()
        self._refresh(output_scale)
        self._update()
        self._advance_clock()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and drop the statistics that were gathered with them.

        Args:
            set_to_none: as in :meth:`torch.optim.Optimizer.zero_grad`.
        """
        super().zero_grad(set_to_none)
        self._discard_statistics()

    def _refresh(self, output_scale: float) -> None:
        """Decide on new factors for the layers that are due, and invert what is taken."""
        candidates = []
        terms = self._count_loss_terms()
        for layer in self._layers.values():
            if not layer.armed:
                continue
            weight, rows = layer.weight, layer.rows
            if weight.grad is None:
                layer.forget()
                continue
            factors = layer.fresh_factors(output_scale * (terms if self.loss_reduction == "mean" else 1))
            if factors is None:
                self._report(
                    layer,
                    "it has a gradient and no statistics (its forward was not called, or it was compiled before THOR "
                    "was made); "
                    + ("its old inverses stay" if layer.refreshes else "its plain gradient is used"),
                )
                continue
            group = self._group_of(weight)
            candidates.append(
                Candidate(
                    layer,
                    factors,
                    rows_per_term=rows / terms,
                    damping=float(group["damping"]),
                    thresholds=(float(group["trace_thresholds"][0]), float(group["trace_thresholds"][1])),
                    decay=float(group["factor_decay"]),
                )
            )
        refresh(candidates, self._report)
        self._discard_statistics()

    def _update(self) -> None:
        """Turn gradients into directions, then weight decay, clipping and momentum, in this order."""
        natural = []  # (group, parameters, directions) of the preconditioned parameters
        moves = []
        for group in self.param_groups:
            preconditioned: tuple[list[Tensor], list[Tensor]] = ([], [])
            plain: tuple[list[Tensor], list[Tensor]] = ([], [])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                layer, is_weight = self._roles.get(self._names[id(parameter)], (None, False))
                if layer is None or not layer.refreshes:
                    side, direction = plain, parameter.grad.to(factor_dtype(parameter.dtype))
                elif is_weight:
                    side, direction = preconditioned, layer.natural_gradient(parameter.grad)
                else:
                    side, direction = preconditioned, layer.natural_bias_gradient(parameter.grad)
                side[0].append(parameter)
                side[1].append(direction)
            natural.append((group, preconditioned[0], self._with_weight_decay(group, *preconditioned)))
            moves += [natural[-1], (group, plain[0], self._with_weight_decay(group, *plain))]
        self._clip(natural)
        for group, parameters, directions in moves:
            self._momentum_step(group, parameters, directions)

    def _with_weight_decay(
        self, group: dict[str, Any], params: list[Tensor], directions: list[Tensor]
    ) -> list[Tensor]:
        """Add ``weight_decay · W`` to the directions of the parameters that the filter admits."""
        decay = float(group["weight_decay"])
        if not decay:
            return directions
        admitted = [i for i, p in enumerate(params) if self._decays(p)]
        if not admitted:
            return directions
        # out of place: a plain parameter's direction is its gradient, and gradients are the user's
        decayed = torch._foreach_add(
            [directions[i] for i in admitted], [params[i] for i in admitted], alpha=decay
        )
        for i, direction in zip(admitted, decayed, strict=True):
            directions[i] = direction
        return directions

    def _clip(self, natural: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]) -> None:
        """Scale the directions of the preconditioned layers so that the predicted KL divergence stays below kl_clip."""
        clipped = [move for move in natural if move[0]["kl_clip"] is not None and move[1]]
        if not clipped:
            return
        device = clipped[0][1][0].device
        divergence = torch.zeros(
            (), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
        )
        for group, parameters, directions in clipped:
            for parameter, direction in zip(parameters, directions, strict=True):
                assert parameter.grad is not None
                divergence += float(group["lr"]) ** 2 * torch.sum(direction * parameter.grad).to(device)
        for group, _, directions in clipped:
            scale = (
                float(group["kl_clip"]) / divergence.clamp(min=torch.finfo(divergence.dtype).tiny)
            ).sqrt()
            torch._foreach_mul_(directions, scale.clamp(max=1.0).to(directions[0].dtype))

    def _momentum_step(self, group: dict[str, Any], params: list[Tensor], directions: list[Tensor]) -> None:
        """``v ← μ v + d``, ``W ← W − lr v``, operation for operation as torch.optim.SGD."""
        if not params:
            return
        momentum = float(group["momentum"])
        if momentum:
            buffers = [self._momentum_buffer(p) for p in params]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, directions)
            directions = (
                list(torch._foreach_add(directions, buffers, alpha=momentum))
                if group["nesterov"]
                else buffers
            )
        torch._foreach_add_(params, directions, alpha=-float(group["lr"]))

    def _advance_clock(self) -> None:
        """Count the step, and arm the layers of the groups whose next step is a refresh."""
        for group in self.param_groups:
            step = group["step"]
            if step >= group["next_refresh"]:
                interval = group["update_interval"]
                if callable(interval):
                    interval = check_interval(f"update_interval({step})", interval(step))
                group["next_refresh"] = step + interval
            group["step"] = step + 1
        for layer in self._layers.values():
            group = self._group_of(layer.weight)
            if group["step"] >= group["next_refresh"]:
                layer.set_due(True)

    # ---- guards -------------------------------------------------------------------------------------------------

    def _largest_gradient(self) -> float:
        """Return a bound on the largest number that a step could make of the gradients; NaN or inf if one is in them.

        One pass over the gradients and one wait for the device: the price of the promise that NaN reaches no weight.
        A natural gradient is at most |∇| / λ, so an overflow is seen here too, before anything has changed.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        bound = 0.0
        size, damping = 1, math.inf
        for group in self.param_groups:
            damping = min(damping, float(group["damping"]))
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or not gradient.numel():
                    continue
                if gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"parameter {self._names[id(parameter)]!r} has a sparse gradient, which THOR does not take; "
                        f"make its module with sparse=False"
                    )
                size = max(size, gradient.numel())
                by_device.setdefault(gradient.device, []).append(gradient)
        for gradients in by_device.values():
            largest = torch.stack([n.float() for n in torch._foreach_norm(gradients, math.inf)]).max().item()
            if not math.isfinite(largest):
                return largest
            bound = max(bound, largest)
        overflow = bound * math.sqrt(size) / damping > torch.finfo(torch.float32).max
        return math.inf if overflow else bound

    def _refuse_nonfinite(self) -> None:
        self._discard_statistics()
        if self.nonfinite == "skip":
            self.skipped_steps += 1
            return
        names = [self._names[id(p)] for g in self.param_groups for p in g["params"] if _has_nonfinite(p.grad)]
        step = max(g["step"] for g in self.param_groups)
        raise FloatingPointError(
            f"step {step}: the gradients of {_some(names) or 'some parameters'} hold NaN, inf or numbers that would "
            f"overflow; weights and optimizer state are as before this step. Lower lr or raise damping, clip the "
            f'gradients, or pass nonfinite="skip" to skip and count such steps'
        )

    def _report(self, layer: LayerCurvature, what: str) -> None:
        """Warn, once a layer and kind of trouble."""
        if (layer.name, what) not in self._reported:
            self._reported.add((layer.name, what))
            step = self._group_of(layer.weight)["step"]
            warnings.warn(f"THOR, step {step}, layer {layer.name!r}: {what}", RuntimeWarning, stacklevel=5)

    # ---- loss scaling -------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler then hands its scale and its verdict to step() instead of unscaling beforehand: the only way to
        # learn the scale from a plain scaler.step(optimizer). With a scaler of our own to ask, the usual way will do.
        return self.grad_scaler is None

    def _scaler_found_inf(self) -> bool:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        return (
            found_inf is not None and float(found_inf) > 0
        )  # a wait for the device that GradScaler would do else

    def _output_scale(self) -> float:
        """Return what unscales the captured output gradients."""
        if self.grad_scaler is not None:
            return 1.0 / self.grad_scaler.get_scale() if self.grad_scaler.is_enabled() else 1.0
        if not any(layer.rows for layer in self._layers.values()):
            return 1.0
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            return 1.0 / float(scale)
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called, so THOR cannot learn the loss scale of the statistics that it "
                "captured; make it with THOR(..., grad_scaler=scaler), or set optimizer.grad_scaler = scaler"
            )
        return 1.0

    def _unscale(self) -> None:
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale.reciprocal().to(parameter.grad.device))

    # ---- bookkeeping --------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Find out what every parameter gets, and watch the layers."""
        trained = [p for group in self.param_groups for p in group["params"]]
        entries, layers = survey(self.model, trained)
        if not layers:
            raise ValueError(
                f"THOR preconditions nn.Linear and nn.Conv2d layers, and {type(self.model).__name__} has none that it "
                f"could; use torch.optim.SGD. What it found:\n{table(entries, None)}"
            )
        if self._capture is not None:
            self._capture.remove()
        self._covered = entries
        self._layers = {
            name: self._layers.get(name)
            or LayerCurvature(
                name, module, kind, lambda p: self.state[p], lambda p: self._group_of(p)["split_dim"]
            )
            for name, (module, kind) in layers.items()
        }
        self._owners = {name: self.model.get_submodule(name.rpartition(".")[0]) for name, _ in self._named()}
        self._roles = {
            f"{name}.{role}".lstrip("."): (layer, role == "weight")
            for name, layer in self._layers.items()
            for role in ("weight", "bias")
        }
        self._index()
        self._capture = Capture(list(self._layers.values()))
        for layer in self._layers.values():
            layer.armed = layer.due if self.state else True

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def _index(self) -> None:
        """Map today's parameters to names and groups: wrappers such as FSDP2 put new objects in the modules."""
        self._names = {}
        for name, module in self._owners.items():
            parameter = module._parameters[name.rpartition(".")[2]]
            self._names[id(parameter)] = name
        self._groups = {id(p): group for group in self.param_groups for p in group["params"]}

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        if id(parameter) not in self._groups:
            self._index()
        return self._groups[id(parameter)]

    def _decays(self, parameter: Tensor) -> bool:
        assert isinstance(parameter, nn.Parameter)
        return self.decay_filter is None or self.decay_filter(self._names[id(parameter)], parameter)

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=factor_dtype(parameter.dtype))
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _materialise(self) -> bool:
        """Make all state at the first step, so that a checkpoint has the same keys on every rank and at every time."""
        if self.state:
            return False
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["momentum"] and parameter.requires_grad:
                    self._momentum_buffer(parameter)
        for layer in self._layers.values():
            layer.materialise()
        return True

    def _count_loss_terms(self) -> int:
        assert self._capture is not None
        given = self.loss_terms() if callable(self.loss_terms) else self.loss_terms
        if given is None:
            return self._capture.loss_terms
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ValueError(
                f"loss_terms={given!r}: loss_terms must be a whole number ≥ 1, the number of terms that the loss of "
                f"one step averages over; None takes the leading dimension of the batch"
            )
        return given

    def _discard_statistics(self) -> None:
        if self._capture is not None:
            self._capture.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, with options of their own.

        Args:
            param_group: as for :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option is out of range, or a parameter is not the model's.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        ours = {id(p) for p in self.model.parameters()}
        strangers = [tuple(p.shape) for p in self.param_groups[-1]["params"] if id(p) not in ours]
        if strangers:
            self.param_groups.pop()
            raise ValueError(
                f"parameters of shapes {_some([str(s) for s in strangers])} are not in the model, so THOR cannot see "
                f"their layers run; pass the model that holds them, or give them an optimizer of their own"
            )
        if self._capture is not None:
            self._attach()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state; callables in the groups are the program's, not the checkpoint's, and are left out.

        Returns:
            As :meth:`torch.optim.Optimizer.state_dict`.
        """
        saved = super().state_dict()
        saved["param_groups"] = [
            {k: v for k, v in group.items() if not callable(v)} for group in saved["param_groups"]
        ]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; factors, inverses and momentum keep the dtype they were saved in.

        Args:
            state_dict: what :meth:`state_dict` gave.

        Raises:
            ValueError: it belongs to another model, or its factors are of other shapes.
        """
        callables = [{k: v for k, v in group.items() if callable(v)} for group in self.param_groups]
        defaults = {k: v for k, v in self.defaults.items() if not callable(v)}
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, callables, strict=True):
            for key, value in {**defaults, **group, **own}.items():
                group[key] = value
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(ids, parameters, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):  # the base class has cast it to the parameter's dtype
                    self.state[parameter][key] = value.detach().to(parameter.device, copy=True)
        self._after_load()

    def _after_load(self) -> None:
        self._index()
        self._discard_statistics()
        for layer in self._layers.values():
            state = self.state[layer.weight] if layer.weight in self.state else {}
            for key, layout in zip(("A", "G"), layer.layouts(), strict=True):
                if key in state and tuple(state[key].shape) != layout.shapes()[0]:
                    raise ValueError(
                        f"layer {layer.name!r}: the checkpoint's factor {key} has blocks of shape "
                        f"{tuple(state[key].shape)}, this model and split_dim need {layout.shapes()[0]}; load it into "
                        f"the model it was saved with"
                    )
            layer.armed = bool(state.get("due", 1))

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "model",
            "decay_filter",
            "loss_reduction",
            "loss_terms",
            "nonfinite",
            "grad_scaler",
            "skipped_steps",
        )
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (
            "_layers" not in self.__dict__ and "model" in state
        ):  # a copy or an unpickled one: not load_state_dict
            self._capture, self._layers, self._reported = None, {}, set()
            self._attach()


def _has_nonfinite(gradient: Tensor | None) -> bool:
    return gradient is not None and not bool(gradient.isfinite().all())


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
