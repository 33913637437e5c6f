"""Adaptive gradient clipping, AGC, and SGD with it, for networks without normalisation.

It follows Brock et al., ICML 2021, section 4.1.

A unit is what computes one output: an index of dim 0 of a parameter of two or more dimensions (a
token of an embedding; a gain of shape ``(C, 1, 1, 1)`` has C units), of dim 1 where the inputs come
first, or a row of the matrix that a kind makes of its weight (``torch_thor.register_kind``). A
parameter of one dimension or none (biases, gains) is one unit, as in the code of the authors: if
every element were a unit, an element that starts at zero could hardly move.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from torch_thor.capture.patterns import Patterns, some
from torch_thor.curvature.geometry import Geometry
from torch_thor.curvature.kinds import kind_of, parameter_names_of
from torch_thor.curvature.kinds.matrix import ConvKind
from torch_thor.optim.excluding import (
    ExcludingOptimizer,
    Found,
    Slot,
    check_dense,
    excluded_parameters,
    gathered,
)
from torch_thor.optim.model_argument import Group, parameters_of
from torch_thor.optim.options import check

# Where the units of a parameter are: the dim of the outputs, or its geometry if they have none.
Units = int | Geometry
# a parameter, its gradient and the units; None to leave it as it is
Clippable = tuple[Tensor, Tensor, Units | None]

# To save kernel launches, smaller tensors than this are measured in batches; a single tensor needs
# no copy.
_NUMBERS_AT_A_TIME = 2**21


class ClipStatistics(NamedTuple):
    """How many units were clipped. Computing it does not synchronise host and device.

    Args:
        clipped: the number of units that were clipped, a 0-dimensional tensor on the device of the
            first parameter.
        units: the number of units that could have been clipped.
    """

    clipped: Tensor
    units: int

    @property
    def share(self) -> Tensor:
        """The share of clipped units, in [0, 1], as a tensor; it is 0 where there were no units."""
        return self.clipped / max(self.units, 1)


@torch.no_grad()
def adaptive_clip_grad_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    clip_factor: float = 0.01,
    eps: float = 1e-3,
    *,
    exclude: Patterns = None,
    foreach: bool | None = None,
) -> ClipStatistics:
    """Clip gradients in place, unit by unit, against the norms of the weights.

    This is the method of Brock et al. 2021, section 4.1.

    Call it in the place of ``torch.nn.utils.clip_grad_norm_``, between ``backward`` and ``step``,
    with any optimizer. With a GradScaler, call it after ``scaler.unscale_(optimizer)``: λ does not
    apply to scaled gradients.

    Args:
        parameters: the model, whose last fully connected layer is not clipped; or parameters, all
            of which are then clipped along dim 0, also where the outputs of a layer are in dim 1
            (transposed convolutions, Hugging Face's ``Conv1D``). Parameters without a gradient are
            ignored.
        clip_factor: λ, the largest ratio of a unit's gradient norm to its weight norm; inf clips
            nothing.
        eps: ε, a lower bound on the weight norm of a unit, so that units at zero can move.
        exclude: the parameters of the model that are not clipped: names or patterns of ``fnmatch``,
            for parameters or for the modules that hold them, where a leading minus keeps what
            matches; or a callable ``(name, parameter) -> bool``. None excludes the last
            ``nn.Linear`` of the model, ``()`` nothing.
        foreach: whether small tensors are measured in batches. None means True; False handles one
            tensor at a time.

    Returns:
        The number of units that were clipped. NaN or inf in a gradient is not detected: its unit is
        NaN afterwards.

    Raises:
        ValueError: λ or ε is not above 0, or a pattern matches nothing.
        TypeError: ``exclude`` is given without the model, or is no pattern.
        RuntimeError: a gradient is sparse.
    """
    options = {"clip_factor": clip_factor, "eps": eps, "foreach": foreach}
    check(options)
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    params, model = parameters_of(given, None, "adaptive_clip_grad_")
    left_alone = last_linear(model) if exclude is None else excluded_parameters(exclude, model)
    units, entries = units_of(model), list[Clippable]()
    for p in params:
        if p.grad is not None:
            check_dense(f"of shape {tuple(p.shape)}", p.grad)
            entries.append((p, p.grad, None if p in left_alone else units.get(p, 0)))
    return add_up(clip(entries, options, Tensor.mul_)[1])


def last_linear(model: nn.Module | None) -> set[Tensor]:
    """Return the last fully connected layer's parameters, which AGC does not clip (section 4.1)."""
    return {p for _, layer in linear_layers(model)[-1:] for p in layer.parameters()}


def linear_layers(model: nn.Module | None) -> list[tuple[str, nn.Linear]]:
    """Return the fully connected layers of a model, with their names."""
    modules = [] if model is None else model.named_modules()
    return [(name, module) for name, module in modules if isinstance(module, nn.Linear)]


def units_of(model: nn.Module | None) -> dict[Tensor, Units]:
    """Find the units of the weights of all layers that have a kind."""
    of_weights: dict[Tensor, Units] = {}
    for module in [] if model is None else model.modules():
        own = dict(module._parameters.items())  # no dict in TorchScript
        weight = own.get(parameter_names_of(module)[0])
        if weight is None or weight.dim() < 2:
            continue
        kind = kind_of(module)
        if kind is None and isinstance(
            module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
        ):
            kind = ConvKind(module)  # of a subclass with a forward of its own
        if kind is None or kind.diagonal_input:  # an embedding: a unit is a token
            continue
        geometry, dim = kind.geometry, int(kind.transposed)
        in_place = geometry.is_view and (weight.dim() == 2 or not geometry.transposed)
        units = geometry.groups * geometry.outputs
        of_weights[weight] = dim if in_place and weight.shape[dim] == units else geometry
    return of_weights


def clip(
    entries: list[Clippable],
    options: Mapping[str, Any],
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> tuple[list[Tensor], list[ClipStatistics]]:
    """Clip gradients, and return them all; a gradient that is not clipped is the same object."""
    gradients = [gradient for _, gradient, _ in entries]
    statistics = []
    for batch in _batches(entries, together=options["foreach"] is not False):
        rows = [(_rows(p, units), _rows(g, units)) for p, g, units in (entries[i] for i in batch)]
        of_weights, of_gradients = (_norms(matrices) for matrices in zip(*rows, strict=True))
        limits = options["clip_factor"] * of_weights.clamp(min=options["eps"])
        too_long = of_gradients > limits
        factors = torch.where(too_long, limits / of_gradients, 1.0)
        sizes = [len(matrix) for matrix, _ in rows]
        statistics.append(ClipStatistics(too_long.sum(), sum(sizes)))
        of_entries = factors.split(sizes) if len(batch) > 1 else [factors]
        for i, factor in zip(batch, of_entries, strict=True):
            gradients[i] = multiply(gradients[i], _spread(factor, entries[i][2], gradients[i]))
    return gradients, statistics


def add_up(statistics: list[ClipStatistics]) -> ClipStatistics:
    """Add up the statistics of several batches of parameters."""
    clipped = [gathered(each.clipped) for each in statistics] or [
        torch.zeros((), dtype=torch.int64, device="cpu")
    ]
    device = clipped[0].device
    on_one_device = torch.stack([count.to(device, non_blocking=True) for count in clipped])
    return ClipStatistics(on_one_device.sum(), sum(each.units for each in statistics))


def _batches(entries: list[Clippable], *, together: bool) -> Iterator[list[int]]:
    """Yield the positions of entries measured together, whose units have the same size."""
    waiting: dict[object, list[int]] = {}
    sizes: dict[object, int] = {}
    for i, (p, g, units) in enumerate(entries):
        if units is None or not g.numel():
            continue
        key: object = i
        # not a DTensor, whose local rows are not known here
        if (
            together
            and type(g) is Tensor
            and isinstance(units, int)
            and p.numel() < _NUMBERS_AT_A_TIME
        ):
            key = (p.device, p.dtype, g.dtype, p.numel() // (p.shape[units] if p.dim() > 1 else 1))
        waiting.setdefault(key, []).append(i)
        sizes[key] = sizes.get(key, 0) + p.numel()
        if sizes[key] >= _NUMBERS_AT_A_TIME:
            sizes.pop(key)
            yield waiting.pop(key)
    yield from waiting.values()


def _rows(tensor: Tensor, units: Any) -> Tensor:
    """Return a parameter or its gradient with one unit per row: a matrix, but for a DTensor."""
    if tensor.dim() <= 1:
        rows = tensor.reshape(1, -1)
    elif isinstance(units, int):
        rows = tensor.movedim(units, 0)
    else:
        matrix = units.to_matrix(gathered(tensor))
        rows = (matrix.mT if units.transposed else matrix).flatten(0, 1)
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    # DTensor flattens no uneven shards
    return rows if hasattr(rows, "to_local") else rows.flatten(1)


def _norms(matrices: tuple[Tensor, ...]) -> Tensor:
    rows = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    norms: Tensor = torch.linalg.vector_norm(rows, dim=tuple(range(1, rows.dim())), dtype=dtype)
    return norms


def _spread(values: Tensor, units: Any, gradient: Any) -> Tensor:
    """Turn one number per unit into a tensor that multiplies the gradient."""
    if gradient.dim() <= 1:
        return values.reshape(())
    if isinstance(units, int):
        return values.reshape([-1 if dim == units else 1 for dim in range(gradient.dim())])
    spread = torch.empty(gradient.shape, dtype=values.dtype, device=values.device)
    by_output = values.reshape(units.groups, -1, 1)
    units.write_(by_output.mT if units.transposed else by_output, spread)
    if hasattr(gradient, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        spread = distribute_tensor(spread, gradient.device_mesh, gradient.placements)
    return spread


# ---- the optimizer -------------------------------------------------------------------------------

# what torch's SGD takes
_SGD = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach")


class AGCSGD(ExcludingOptimizer):
    """SGD with momentum on gradients that are clipped unit by unit against their weights' norms.

    A unit i of a weight W is one output: a row of the weight of a linear layer, a filter of a
    convolution; a bias or a gain is one unit. With its gradient G_i and Frobenius norms, if
    ``‖G_i‖ / max(‖W_i‖, ε) > λ``, then ``G_i ← λ · max(‖W_i‖, ε) / ‖G_i‖ · G_i``. Weight decay
    (``+ weight_decay · W``, not clipped) and momentum follow as in ``torch.optim.SGD``, dampening
    and Nesterov included. With ``clip_factor=float("inf")`` the whole step is the step of
    ``torch.optim.SGD``, bit for bit. ``p.grad`` is not changed.

    The last fully connected layer is not clipped (section 4.1). It is looked up in the model, so
    the optimizer needs the model, or ``exclude=()``. A GradScaler passes unscaled gradients to
    ``step``, so it needs no special treatment. State dicts of ``torch.optim.SGD`` can be loaded;
    ``exclude`` is not part of state dicts.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``; or,
            with ``exclude=()``, only parameters, whose units are then all along dim 0.
        lr: learning rate, a float or a one-element tensor, with the meaning that it has for SGD.
        momentum: μ in [0, 1).
        dampening: τ in ``v ← μ v + (1 − τ) d``; the first step has ``v = d``, as in torch's SGD.
        weight_decay: added to the clipped gradient as ``weight_decay · W``.
        nesterov: step along ``d + μ v`` instead of ``v``.
        dampen_first: whether the first step is dampened too, ``v = (1 − τ) d``, as in the code of
            the authors of AGC, whose momentum starts at zero. Nesterov momentum may then be
            dampened, as in that code.
        clip_factor: λ. The paper's grid at batch size 4096 ends at 0.01; smaller batches use larger
            values.
        eps: ε, a lower bound on the weight norm of a unit, so that units at zero can move.
        model: the model, if ``params`` are parameters.
        exclude: the parameters that are not clipped: names or patterns of ``fnmatch``, for
            parameters or for the modules that hold them, where a leading minus keeps what matches;
            or a callable ``(name, parameter) -> bool``. None excludes the ``nn.Linear`` that was
            registered last, ``()`` nothing; ``print(optimizer)`` says which.
        maximize: maximise the objective instead of minimising it.
        foreach: None clips in batches and leaves the rest to torch, as for its SGD; True handles
            tensors in batches; False one at a time, with less memory for the clipped copies.

    Raises:
        ValueError: an option is out of range, a pattern matches no parameter, or a parameter is not
            the model's.
        TypeError: the model is missing, or ``exclude`` is no pattern.
    """

    clip_statistics: ClipStatistics | None = None
    """How many units the latest step clipped; it is None before the first step.

    It is not part of checkpoints and copies.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        dampen_first: bool = False,
        clip_factor: float = 0.01,
        eps: float = 1e-3,
        model: nn.Module | None = None,
        exclude: Patterns = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        if exclude is None and parameters_of(params, model, type(self).__name__)[1] is None:
            raise TypeError(
                "model=None: AGC leaves out the last fully connected layer, so AGCSGD must know "
                "the model; pass AGCSGD(model, ...) or AGCSGD(parameters, model=model, ...), or "
                "exclude=() to clip every parameter"
            )
        super().__init__(params, model, exclude, locals())

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["nesterov"] and not (
            group["momentum"] > 0 and (group["dampening"] == 0 or group["dampen_first"])
        ):
            raise ValueError(
                "nesterov=True: nesterov must be False where momentum is 0, or where dampening is "
                "not and dampen_first is False; give a momentum > 0, and no dampening or "
                "dampen_first=True"
            )

    def _excluded_by_default(self, params: list[Tensor]) -> set[Tensor]:
        return last_linear(self.model)

    def _slots_of(self, group: Group) -> list[Slot]:
        units = units_of(self.model)
        pairs = zip(super()._slots_of(group), group["params"], strict=True)
        return [
            slot._replace(units=None if slot.excluded else units.get(p, 0)) for slot, p in pairs
        ]

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self._described()}"

    def _described(self) -> str:
        """Say which parameters are not clipped, and why."""
        names = some(self.excluded, most=8)
        if self.exclude is not None:
            return f"not clipped, as exclude= says: {names or 'none'}"
        layers = linear_layers(self.model)
        if not layers:
            return (
                f"all are clipped: {type(self.model).__name__} has no nn.Linear, of which the last "
                "one would not be; exclude= names what is left out"
            )
        last = repr(layers[-1][0]) if layers[-1][0] else "the model itself"
        return (
            f"not clipped is the last nn.Linear, {last}: "
            f"{names or 'its parameters are in no group'}"
        )

    def _make_state(self, parameter: Tensor, group: Group) -> None:
        # a step of torch's SGD would put weight decay into the momentum
        if group["momentum"]:
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))

    def _update(self, of_groups: list[list[Found]]) -> None:
        statistics: list[ClipStatistics] = []
        for group, together in zip(self.param_groups, of_groups, strict=True):
            for part in [[p] for p in together] if group["foreach"] is False else [together]:
                statistics += self._update_together(group, part)
        self.clip_statistics = add_up(statistics)

    def _update_together(self, group: Group, part: list[Found]) -> list[ClipStatistics]:
        params = [p for _, p, _ in part]
        entries = [(p, gradient, slot.units) for slot, p, gradient in part]
        clipped, statistics = clip(entries, group, torch.mul)
        # copies of what is not clipped, too, because torch's foreach SGD adds the momentum into the
        # gradients
        gradients = [
            new.to(g.dtype, copy=new is g) for new, (_, _, g) in zip(clipped, part, strict=True)
        ]
        buffers = [self.state.get(p, {}).get("momentum_buffer") for p in params]
        # without a buffer torch's first step is not dampened; with a zero buffer it is
        if group["dampen_first"]:
            buffers = [
                torch.zeros_like(g) if b is None else b
                for b, g in zip(buffers, gradients, strict=True)
            ]
        sgd(params, gradients, buffers, **{name: group[name] for name in _SGD})
        for p, buffer in zip(params, buffers, strict=True) if group["momentum"] else ():
            self.state[p]["momentum_buffer"] = buffer
        return statistics
