"""What ``torch_thor.THOR.coverage`` lists: how each parameter is trained, why not otherwise."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass

from torch import nn

from torch_thor.capture.inspection import Inspection
from torch_thor.capture.reasons import LEFT_OUT, NOT_TRAINED
from torch_thor.curvature.kinds import class_name_of
from torch_thor.curvature.layer import Layer


@dataclass(frozen=True)
class Covered:
    """How one parameter is trained.

    Args:
        name: the parameter's name in the model.
        shape: its shape.
        kind: the kind of its layer, such as ``"Linear"``, ``"Conv2d"`` or ``"MultiheadAttention"``;
            the class of the module that owns it, where it is not preconditioned.
        factor_sizes: the numbers of rows of A and of G, for one group; None where there are no
            factors. A bias has only G, and with ThorMuon a weight has only A.
        groups: the number of independent pairs (A, G): the groups of a convolution, the three
            blocks of a fused projection.
        reason: why it is not preconditioned; None if it is.
        note: further information, such as the parameters it is shared with; None if there is none.
        trained: False for a parameter that is frozen or in no parameter group.
        rest: what trains it where it is not preconditioned: ``"plain momentum"``, or with ThorMuon
            ``"AdamW"`` and, for a matrix, ``"orthogonalised momentum"``.
        matrices: with ThorMuon, (rows, columns) of each matrix that is orthogonalised by itself: of
            the whole parameter, or of its parts (groups, experts, the projections of a fused weight
            or those of ``row_splits``, rows that ``layers`` leaves out). Empty for what
            AdamW trains.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    factor_sizes: tuple[int, ...] | None = None
    groups: int = 1
    reason: str | None = None
    note: str | None = None
    trained: bool = True
    rest: str = "plain momentum"
    matrices: tuple[tuple[int, int], ...] = ()

    @property
    def preconditioned(self) -> bool:
        """Whether the parameter is trained with a natural gradient.

        With ThorMuon, whether it is orthogonalised with A.
        """
        return self.reason is None


def covered(
    model: nn.Module,
    inspection: Inspection,
    plain: str,
    matrix: str | None,
    matrices: Container[str] = (),
) -> list[Covered]:
    """Return one entry for each parameter, in the model's order.

    Args:
        model: the model.
        inspection: what it was found to hold.
        plain: how parameters that are not preconditioned are trained, in words.
        matrix: how matrices among them are; None if as all others.
        matrices: the names of these matrices.

    Returns:
        The entries.
    """
    layers, left_out = _by_parameter(inspection.layers.values()), _by_parameter(inspection.left_out)
    entries = []
    for name, parameter in model.named_parameters():
        key, shape = id(parameter), tuple(parameter.shape)
        owner, *others = inspection.owners[key]
        is_matrix = key in layers or name in matrices
        otherwise = plain if matrix is None or not is_matrix else matrix
        if key not in layers:
            entry = Covered(
                name,
                shape,
                class_name_of(owner.module),
                reason=inspection.reasons[key],
                trained=inspection.reasons[key] != NOT_TRAINED,
                rest=otherwise,
            )
            entries.append(entry)
            continue
        first, kind = layers[key][0], layers[key][0].kind
        of_weight = (kind.inputs,) if inspection.inputs_alone else (kind.inputs, kind.outputs)
        sizes = of_weight if first.weight.parameter is parameter else (kind.outputs,)
        notes = [f"shared with {', '.join(repr(o.name) for o in others)}"] if others else []
        notes += [f"{otherwise} for {layer.name!r}: {LEFT_OUT}" for layer in left_out.get(key, ())]
        groups, note = kind.groups * len(layers[key]), "; ".join(notes) or None
        entry = Covered(name, shape, kind.label, sizes, groups, note=note, rest=otherwise)
        entries.append(entry)
    return entries


def _by_parameter(layers: Iterable[Layer]) -> dict[int, list[Layer]]:
    of_parameters: defaultdict[int, list[Layer]] = defaultdict(list)
    for layer in layers:
        for view in (layer.weight, *layer.biases):
            of_parameters[id(view.parameter)].append(layer)
    return dict(of_parameters)


class Coverage(list[Covered]):
    """The entries of all parameters of a model. It prints as a table."""

    def __str__(self) -> str:
        return table(self)


def table(entries: Iterable[Covered], factors: str = "factors") -> str:
    """Return the entries as a table for people to read."""
    rows = [("parameter", "shape", "kind", factors)]
    for entry in entries:
        sizes = ("A " if entry.matrices else "") + " x ".join(map(str, entry.factor_sizes or ()))
        sizes += f" x {entry.groups} groups" if entry.groups > 1 else ""
        if not entry.preconditioned:
            sizes = f"{entry.rest if entry.trained else 'not trained'}: {entry.reason}"
        alike = Counter(entry.matrices).items()
        parts = ", ".join(
            f"{f'{count} of ' if count > 1 else ''}{m} x {n}" for (m, n), count in alike
        )
        told = [
            sizes,
            f"orthogonalised: {parts}" if parts else "",
            entry.note if entry.preconditioned else "",
        ]
        shape = " x ".join(map(str, entry.shape)) or "number"
        rows.append((entry.name, shape, entry.kind, "; ".join(part for part in told if part)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d}" for a, b, c, d in rows
    )
