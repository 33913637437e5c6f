"""What each parameter gets: its kind of curvature and factor sizes, or the reason why it has none."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torch_thor.curvature.kinds import Kind, kind_of


@dataclass(frozen=True)
class Covered:
    """How one parameter is trained.

    Args:
        name: the parameter's name in the model.
        shape: its shape.
        kind: ``"Linear"``, ``"Conv2d"``; for the rest the class of the module that owns it.
        factor_sizes: rows of A and of G (of one group), None where there are none; a bias has G alone.
        groups: independent (A, G) pairs.
        reason: why it is trained by plain momentum; None if it is preconditioned.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    factor_sizes: tuple[int, ...] | None = None
    groups: int = 1
    reason: str | None = None

    @property
    def preconditioned(self) -> bool:
        """Whether the parameter gets a natural gradient."""
        return self.reason is None


def survey(model: nn.Module, trained: Iterable[Tensor]) -> tuple[list[Covered], dict[str, tuple[nn.Module, Kind]]]:
    """Look at every parameter of a model.

    Args:
        model: the model.
        trained: the parameters that the optimizer has.

    Returns:
        An entry a parameter, in the model's order; and the layers to precondition, by module name.

    Raises:
        ValueError: a parameter has no shape yet (a lazy module).
    """
    trained_ids = {id(p) for p in trained}
    owners: defaultdict[int, list[tuple[str, str, nn.Module]]] = defaultdict(list)
    reasons: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[id(parameter)].append((module_name, parameter_name, module))
        if isinstance(module, nn.MultiheadAttention):
            for parameter in module.parameters():
                reasons[id(parameter)] = "MultiheadAttention uses it without calling a layer: no statistics"
    entries, layers = [], {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet; run one batch through the lazy module before THOR is made"
            )
        module_name, parameter_name, module = owners[id(parameter)][0]
        entry, kind = _entry(
            name,
            parameter,
            parameter_name,
            module,
            owners[id(parameter)],
            trained_ids,
            reasons.get(id(parameter)),
        )
        entries.append(entry)
        if kind is not None:
            layers[module_name] = (module, kind)
    return _biases_follow_weights(entries, layers), layers


def _entry(
    name: str,
    parameter: nn.Parameter,
    parameter_name: str,
    module: nn.Module,
    owners: list[tuple[str, str, nn.Module]],
    trained_ids: set[int],
    reason: str | None,
) -> tuple[Covered, Kind | None]:
    shape, label = tuple(parameter.shape), type(module).__name__
    kind = kind_of(module)
    if id(parameter) not in trained_ids:
        reason = "in no parameter group of this optimizer: not trained"
    elif reason is None and len(owners) > 1:
        reason = f"shared by {', '.join(repr(f'{m}.{p}'.lstrip('.')) for m, p, _ in owners)}"
    elif reason is None and not parameter.is_floating_point():
        reason = f"{parameter.dtype} is not a real floating-point type"
    elif reason is None and kind is None:
        parent = next((c for c in (nn.Linear, nn.Conv2d) if isinstance(module, c)), None)
        reason = f"{label} overrides the forward of {parent.__name__}" if parent else f"no curvature for {label}"
    if reason is not None or kind is None:
        return Covered(name, shape, label, reason=reason), None
    if parameter_name == "weight":
        return Covered(name, shape, kind.label, (kind.inputs, kind.outputs), kind.groups), kind
    if parameter_name == "bias":
        return Covered(name, shape, kind.label, (kind.outputs,), kind.groups), None
    return Covered(name, shape, label, reason=f"not the weight or bias of a {kind.label}"), None


def _biases_follow_weights(entries: list[Covered], layers: dict[str, tuple[nn.Module, Kind]]) -> list[Covered]:
    """A bias is solved with its layer's G, so it is preconditioned only where the weight is."""
    result = []
    for entry in entries:
        module_name = entry.name.rpartition(".")[0]
        if entry.preconditioned and module_name not in layers:
            entry = Covered(entry.name, entry.shape, entry.kind, reason="the weight of its layer is not preconditioned")
        result.append(entry)
    return result


def table(entries: Iterable[Covered], split_dim: str) -> str:
    """Return the entries as text for people.

    Args:
        entries: what :func:`survey` found.
        split_dim: the block size, for the heading

    Returns:
        Lines of columns.
    """
    rows = []
    for entry in entries:
        sizes = " x ".join(str(s) for s in entry.factor_sizes or ()) + (
            f" x {entry.groups} groups" if entry.groups > 1 else ""
        )
        rows.append((entry.name, entry.kind, sizes if entry.preconditioned else f"plain momentum: {entry.reason}"))
    rows = [("parameter", "kind", f"factors (split {split_dim})"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
