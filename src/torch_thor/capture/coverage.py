"""What :meth:`torch_thor.THOR.coverage` lists: for each parameter its kind and factor sizes, or why it has none."""

from collections.abc import Iterable
from dataclasses import dataclass

# Reasons that other modules compare with.
LEFT_OUT = "left out by layers="
NOT_TRAINED = "in no parameter group of this optimizer: not trained"
NORM = "a normalisation layer"


@dataclass(frozen=True)
class Covered:
    """How one parameter is trained.

    Args:
        name: the parameter's name in the model.
        shape: its shape.
        kind: the kind of its layer, such as ``"Linear"``, ``"Conv2d"`` or ``"MultiheadAttention"``; the class of the
            module that owns it, where it is not preconditioned.
        factor_sizes: the numbers of rows of A and of G, for one group; None where there are no factors. A bias has G
            alone, and with ThorMuon a weight has A alone.
        groups: the number of independent pairs (A, G): the groups of a convolution, the three blocks of a fused
            projection.
        reason: why it is not preconditioned; None if it is.
        note: further information, such as the parameters it is shared with; None if there is none.
        trained: False for a parameter that is frozen or in no parameter group.
        rest: what trains it where it is not preconditioned: ``"plain momentum"``, or with ThorMuon
            ``"AdamW"`` and, for a matrix, ``"orthogonalised momentum"``.
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

    @property
    def preconditioned(self) -> bool:
        """Whether the parameter is trained with a natural gradient."""
        return self.reason is None


def table(entries: Iterable[Covered], split_dim: str) -> str:
    """Return the entries as a table for people to read."""
    rows = []
    for entry in entries:
        sizes = " x ".join(str(s) for s in entry.factor_sizes or ()) + (
            f" x {entry.groups} groups" if entry.groups > 1 else ""
        )
        factors = "; ".join(part for part in (sizes, entry.note) if part)
        rows.append((entry.name, entry.kind, factors if entry.preconditioned else _not_preconditioned(entry)))
    rows = [("parameter", "kind", f"factors (split {split_dim})"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def _not_preconditioned(entry: Covered) -> str:
    return f"{entry.rest if entry.trained else 'not trained'}: {entry.reason}"
