"""What THOR reports to users: its layers and their factors, the coverage of the model, and the latest refresh."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from torch_thor.capture.coverage import Covered, table
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.optim.covered import sizes
from torch_thor.optim.layer_registry import LayerRegistry

# The entries of a parameter group that are not options: its parameters, and the counters of step().
NO_OPTIONS = {"params", "param_names", "step", "next_refresh", "last_loss_terms", "loss_scale"}


class Reporting(torch.optim.Optimizer):
    """The part of THOR that reports to users."""

    _registry: LayerRegistry
    _last_refresh: tuple[RefreshEvent, ...]

    @property
    def curvature(self) -> Mapping[str, LayerCurvature]:
        """The preconditioned layers, by module name."""
        return MappingProxyType(self._registry.layers)

    @property
    def row_mask(self) -> Tensor | None:
        """The rows of sequences that count: ``bool``, ``(N, L)``, True for real tokens and False for padding.

        Set it before each forward pass, as in ``optimizer.row_mask = attention_mask.bool()``; None counts every row. It
        applies to layers whose input has these leading dimensions, and to embeddings whose input has this shape. It
        does not change the number of loss terms: see ``loss_terms``.
        """
        return self._registry.capture.row_mask

    @row_mask.setter
    def row_mask(self, mask: Tensor | None) -> None:
        if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim()):
            what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(
                f"row_mask={what}: must be a bool tensor (N, L), True for the rows that count, or None; "
                f"use attention_mask.bool()"
            )
        self._registry.capture.row_mask = mask

    @property
    def last_refresh(self) -> tuple[RefreshEvent, ...]:
        """The decisions of the latest :meth:`step`, one per refreshed layer; empty if none. Not part of checkpoints."""
        return self._last_refresh

    def coverage(self) -> list[Covered]:
        """List how each parameter of the model is trained.

        Returns:
            One entry per parameter, in the model's order: its kind and factor sizes, or the reason why it has none.
        """
        return self._registry.coverage(self.param_groups, self.state)

    def __repr__(self) -> str:
        entries = self.coverage()
        covered, total = sizes(entries)
        there = [layer for layer in self._registry.layers.values() if layer.weight_view.is_there]
        layers = sum(layer.weight.requires_grad for layer in there)
        split = ", ".join(str(s) for s in dict.fromkeys(g["split_dim"] for g in self.param_groups))
        return (
            f"{self._options_listed()}\n{covered:,} of {total:,} trained parameters, in {layers} layers, are "
            f"preconditioned:\n{table(entries, split)}"
        )

    def _options_listed(self) -> str:
        """List the options of each group in the order of the arguments, without internal entries."""
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            keys = [key for key in dict.fromkeys((*self.defaults, *group)) if key in group and key not in NO_OPTIONS]
            lines += [f"Parameter Group {number}", *(f"    {key}: {group[key]}" for key in keys)]
        return "\n".join((*lines, ")"))
