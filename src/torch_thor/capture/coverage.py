"""What each parameter gets: its kind of curvature and factor sizes, or the reason why it has none."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Covered:
    """How one parameter is trained.

    Args:
        name: the parameter's name in the model.
        shape: its shape.
        kind: ``"Linear"``, ``"Conv2d"``, ``"MultiheadAttention"``…; for the rest the class of the module that owns it.
        factor_sizes: rows of A and of G (of one group), None where there are none; a bias has G alone, a weight with
            ``scaling="spectral"`` A alone.
        groups: independent (A, G) pairs: the groups of a convolution, the three blocks of a fused projection.
        reason: why it is not preconditioned; None if it is.
        note: what else there is to say, such as with whom it is shared.
        trained: False for what is frozen or in no parameter group.
        rest: what trains it where it is not preconditioned: ``"plain momentum"``, or with ``scaling="spectral"``
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
        """Whether the parameter gets a natural gradient."""
        return self.reason is None


def table(entries: Iterable[Covered], split_dim: str) -> str:
    """Return the entries as text for people.

    Args:
        entries: what :func:`torch_thor.capture.inspection.inspect_model` found.
        split_dim: the block size, for the heading

    Returns:
        Lines of columns.
    """
    rows = []
    for entry in entries:
        sizes = " x ".join(str(s) for s in entry.factor_sizes or ()) + (
            f" x {entry.groups} groups" if entry.groups > 1 else ""
        )
        gets = "; ".join(part for part in (sizes, entry.note) if part)
        rows.append((entry.name, entry.kind, gets if entry.preconditioned else _plainly(entry)))
    rows = [("parameter", "kind", f"factors (split {split_dim})"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def _plainly(entry: Covered) -> str:
    return f"{entry.rest if entry.trained else 'not trained'}: {entry.reason}"
