"""One preconditioned layer: its fresh statistics, its stale inverses, and the way between gradient and matrix.

Fresh statistics (sums over the rows of this step) belong to the object and die with the step; factors, inverses and
counters belong to the mapping that is handed in, as tensors and numbers only, so that whoever saves the mapping has
saved the layer.
"""

import math
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import BlockDiagonal, BlockLayout
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.precision import factor_dtype, ieee_float32

State = MutableMapping[str, Any]

_NO_CHANGE_YET = -1.0  # a number, because NaN never equals itself and None is no number to a checkpoint


class LayerCurvature:
    """The Kronecker-factored curvature of one layer, Fisher block ≈ T · (A ⊗ G) (Chen et al. 2021, section 3.1).

    Args:
        name: the module's name in the model.
        module: the layer; its weight is looked up anew each time, because wrappers replace parameters.
        kind: its geometry.
        states: returns the mapping from parameters to their state (one that makes missing entries).
        split_dim_of: returns the block size for a parameter (None: unsplit).
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        kind: Kind,
        states: Callable[[], MutableMapping[Tensor, State]],
        split_dim_of: Callable[[Tensor], int | None],
    ) -> None:
        self.name = name
        self.module = module
        self.kind = kind
        self.armed = True  # the flag that a forward pass tests: are statistics wanted?
        self.counts = False  # the other: is it this layer's input that tells how many loss terms there are?
        self.rows = 0  # R of this step so far
        self._states = states
        self._split_dim_of = split_dim_of
        self._sums: tuple[BlockDiagonal, BlockDiagonal] | None = None

    # ---- what users look at -------------------------------------------------------------------------------------

    def factors(self) -> tuple[Tensor | list[Tensor], Tensor | list[Tensor]]:
        """Return A and G as last taken, dense, zeros between the blocks where split.

        Returns:
            ``(A, G)``, of shapes ``(d_in, d_in)`` and ``(d_out, d_out)`` with ``d_in`` a patch for a convolution; for
            a grouped convolution two lists, one entry a group.

        Raises:
            RuntimeError: nothing has been taken yet.
        """
        return self._dense("A"), self._dense("G")

    def inverses(self) -> tuple[Tensor | list[Tensor], Tensor | list[Tensor]]:
        """Return the damped inverses in use, ``(A + √(λ/T) I)⁻¹`` and ``(G + √(λ/T) I)⁻¹``, dense.

        Returns:
            As :meth:`factors`.

        Raises:
            RuntimeError: nothing has been inverted yet.
        """
        return self._dense("A_inverse"), self._dense("G_inverse")

    @property
    def refreshes(self) -> int:
        """How often new factors were taken and inverted."""
        return int(self.state.get("refreshes", 0))

    @property
    def stopped(self) -> bool:
        """Whether the trace rule has stopped this layer for good."""
        return bool(self.state.get("stopped", 0))

    @property
    def last_trace_change(self) -> float | None:
        """Δ of the latest refresh that had factors to compare with, or None."""
        change = float(self.state.get("last_trace_change", _NO_CHANGE_YET))
        return None if change == _NO_CHANGE_YET else change

    @property
    def rows_per_term(self) -> float:
        """T = R / N of the factors in use; 0 before there are any."""
        return float(self.state.get("rows_per_term", 0.0))

    def __repr__(self) -> str:
        return (
            f"LayerCurvature({self.name!r}, {self.kind.label}, groups={self.kind.groups}, d_in={self.kind.inputs}, "
            f"d_out={self.kind.outputs}, refreshes={self.refreshes}, stopped={self.stopped}, "
            f"last_trace_change={self.last_trace_change})"
        )

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> nn.Parameter:
        """The weight that is preconditioned."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def state(self) -> State:
        """The mapping that holds factors, inverses and counters; empty before :meth:`materialise`."""
        return self._states().get(self.weight, {})  # get: looking must not make an entry

    @property
    def due(self) -> bool:
        """Whether the next step with statistics has to decide on new factors."""
        return bool(self.state.get("due", 1))

    def set_due(self, due: bool) -> None:
        """Say whether a refresh is wanted; a stopped layer stays stopped.

        Args:
            due: True to gather statistics from now on, False to stop.
        """
        due = due and not self.stopped
        self.state["due"] = int(due)
        self.armed = due

    def layouts(self) -> tuple[BlockLayout, BlockLayout]:
        """Return how A and G are cut.

        Returns:
            The layouts of A and G.
        """
        split = self._split_dim_of(self.weight)
        kind = self.kind
        return BlockLayout.of(kind.groups, kind.inputs, split), BlockLayout.of(kind.groups, kind.outputs, split)

    def materialise(self) -> None:
        """Make every entry of the state, so that a checkpoint has the same keys and shapes at any time."""
        if "refreshes" in self.state:
            return
        weight = self.weight
        state = self._states()[weight]
        dtype = factor_dtype(weight.dtype)
        for key, layout in zip(("A", "G"), self.layouts(), strict=True):
            for matrix in (key, f"{key}_inverse"):
                self._store(matrix, BlockDiagonal.zeros(layout, dtype=dtype, device=weight.device))
        state.update(rows_per_term=0.0, refreshes=0, stopped=0, due=1, last_trace_change=_NO_CHANGE_YET)

    def _store(self, key: str, matrix: BlockDiagonal) -> None:
        self.state[key] = matrix.blocks
        if matrix.tail is not None:
            self.state[f"{key}_tail"] = matrix.tail

    def matrix(self, key: str) -> BlockDiagonal:
        """Return a stored block-diagonal matrix.

        Args:
            key: ``"A"``, ``"G"``, ``"A_inverse"`` or ``"G_inverse"``.

        Returns:
            The matrix; its tensors are those of the state.
        """
        layout = self.layouts()[0 if key.startswith("A") else 1]
        return BlockDiagonal(layout, self.state[key], self.state.get(f"{key}_tail"))

    def _dense(self, key: str) -> Tensor | list[Tensor]:
        if not self.refreshes:
            raise RuntimeError(
                f"layer {self.name!r} has no factors yet: they are taken in the first optimizer.step() after a "
                f"backward pass through the layer"
            )
        matrices = self.matrix(key).dense()
        return matrices if self.kind.groups > 1 else matrices[0]

    # ---- fresh statistics ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, x: Tensor, g: Tensor) -> None:
        """Add the rows of one forward and backward pass through the layer.

        Args:
            x: the layer's input.
            g: the gradient of the loss with respect to the layer's output, as autograd gives it.
        """
        if not x.numel() or not g.numel():  # an empty batch has no rows
            return
        dtype = factor_dtype(self.weight.dtype)
        sums = self._sums
        if sums is None:
            a_layout, g_layout = self.layouts()
            sums = self._sums = (
                BlockDiagonal.zeros(a_layout, dtype=dtype, device=x.device),
                BlockDiagonal.zeros(g_layout, dtype=dtype, device=g.device),
            )
        with ieee_float32(x.device.type):
            for samples in self.kind.input_samples(x.detach(), dtype):
                sums[0].add_second_moment_(samples)
                self.rows += samples.shape[-1]
            for samples in self.kind.output_samples(g.detach(), dtype):
                sums[1].add_second_moment_(samples)

    def fresh_factors(self, output_scale: float) -> tuple[BlockDiagonal, BlockDiagonal] | None:
        """Return A and G of this step's rows and forget the rows.

        Args:
            output_scale: what turns the gathered output gradients into gradients of one loss term (N for a mean).

        Returns:
            ``(A, G)``, or None where no row came by.
        """
        sums, rows = self._sums, self.rows
        self.forget()
        if sums is None or not rows:
            return None
        for part in sums[0].parts():
            part.div_(rows)
        for part in sums[1].parts():
            # in two factors, because scale² of a scaled half-precision loss can leave the range of float32
            part.mul_(output_scale).mul_(output_scale / rows)
        return sums

    def forget(self) -> None:
        """Drop the statistics of this step."""
        self._sums, self.rows = None, 0

    # ---- stale inverses -----------------------------------------------------------------------------------------

    def take(
        self,
        factors: tuple[BlockDiagonal, BlockDiagonal],
        inverses: tuple[BlockDiagonal, BlockDiagonal],
        rows_per_term: float,
    ) -> None:
        """Put new factors and their inverses to use.

        Args:
            factors: A and G.
            inverses: their damped inverses.
            rows_per_term: T.
        """
        for key, factor, inverse in zip(("A", "G"), factors, inverses, strict=True):
            self._store(key, factor)
            self._store(f"{key}_inverse", inverse)
        self.state["rows_per_term"] = rows_per_term
        self.state["refreshes"] = self.refreshes + 1

    @torch.no_grad()
    def accumulate_natural_gradient_(self, gradient: Tensor, into: Tensor, decay: float) -> None:
        """``into ← decay * into + (1/T) · G_d⁻¹ ∇W A_d⁻¹``: with the momentum and μ, the momentum's whole step.

        Args:
            gradient: of the weight's shape.
            into: of the weight's shape, in the factors' dtype; changed in place.
            decay: a number.
        """
        a_inverse, g_inverse = self.matrix("A_inverse"), self.matrix("G_inverse")
        shape = (self.kind.groups, self.kind.outputs, self.kind.inputs)
        direct = into.is_contiguous()  # else channels_last, where rows of W.flatten(1) are no view
        target = into.view(shape) if direct else into.reshape(shape)
        with ieee_float32(gradient.device.type):
            left = g_inverse.left_multiply(gradient.to(a_inverse.blocks.dtype).reshape(shape))
            a_inverse.accumulate_right_product_(left, 1.0 / self.rows_per_term, target, decay)
        if not direct:
            into.copy_(target.view(into.shape))

    @torch.no_grad()
    def accumulate_natural_bias_gradient_(self, gradient: Tensor, into: Tensor, decay: float) -> None:
        """``into ← decay * into + (1/T) · G_d⁻¹ ∇b``: the bias sees the constant input 1, so its A is the number 1.

        Args:
            gradient: ``(d_out,)``.
            into: of the same shape, in the factors' dtype; changed in place.
            decay: a number.
        """
        g_inverse = self.matrix("G_inverse")
        column = gradient.to(g_inverse.blocks.dtype).reshape(self.kind.groups, self.kind.outputs, 1)
        with ieee_float32(gradient.device.type):
            solved = g_inverse.left_multiply(column).reshape(into.shape)
        into.mul_(decay).add_(solved, alpha=1.0 / self.rows_per_term)

    def trace_of_fisher(self, factors: tuple[Tensor, Tensor], damping: float) -> float:
        """Return tr(A ⊗ G + λI), summed over groups.

        Args:
            factors: traces of A and of G, ``(groups,)`` each, on the host.
            damping: λ.

        Returns:
            The trace; NaN or inf if a factor holds one.
        """
        size = self.kind.groups * self.kind.inputs * self.kind.outputs
        return math.fsum((factors[0].double() * factors[1].double()).tolist()) + damping * size
