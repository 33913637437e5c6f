"""``split_dim="auto"``: the choice of the split dimension in the first step, which replaces the word in the group."""

import warnings
from collections.abc import Mapping, Sequence
from typing import cast

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes
from torch_thor.curvature.statistics import Factors
from torch_thor.optim.parameter_index import ParameterIndex
from torch_thor.optim.parameters import Group
from torch_thor.split import cache
from torch_thor.split.choice import candidates, choose
from torch_thor.split.observe import losses_of

AUTO = "auto"
FALLBACK = 128  # the paper's choice for ResNet-50


def check_whole(groups: Sequence[Group], index: ParameterIndex) -> None:
    """Raise an error for ``split_dim="auto"`` if the rows of parameters are divided among processes."""
    if index.sharded and any(group["split_dim"] == AUTO for group in groups):
        raise ValueError(
            'split_dim="auto" measures whole factors, and these are split where fully_shard divides the parameters; '
            "give a number (torch-thor split-dim chooses one for a model on one process)"
        )


class AutoSplit:
    """Chooses the split dimension of the parameter groups that have ``split_dim="auto"``, one for all of them."""

    def __init__(self, groups: list[Group], layers: Mapping[str, LayerCurvature]) -> None:
        self._groups = [group for group in groups if group["split_dim"] == AUTO]
        self._layers: dict[str, LayerCurvature] = {}
        if self._groups:
            trained = {k: one for k, one in layers.items() if one.weight.requires_grad}
            self._layers = {k: one for k, one in trained.items() if one.weight_view.options["split_dim"] == AUTO}

    def from_cache(self, processes: Processes) -> None:
        """Use the split dimension that an earlier training has stored for this model, device and version."""
        if not self._groups:
            return
        found = FALLBACK if not self._layers else cache.load(self._layers) if processes.first else None
        agreed = int(processes.gather([found or 0])[0][0])
        if agreed:
            self._settle(agreed)

    def from_statistics(self, processes: Processes) -> None:
        """Choose the split dimension from the unsplit statistics of this step, and store it for later trainings."""
        if not self._groups:
            return
        sums: dict[str, Sequence[BlockDiagonal]] = {}
        for name, layer in self._layers.items():
            own = cast(Factors | None, layer.statistics.gathered())  # check_whole() excludes others
            if own is not None:
                totals = iter(processes.sum_on_first([part for factor in own for part in factor.parts()]))
                if processes.first:
                    sums[name] = [factor.with_parts([next(totals) for _ in factor.parts()]) for factor in own]
        chosen = self._choose(sums) if processes.first else 0
        self._settle(int(processes.gather([chosen])[0][0]))

    def _choose(self, sums: Mapping[str, Sequence[BlockDiagonal]]) -> int:
        split_dims = candidates(self._layers.values())
        try:
            losses = {name: losses_of(factors, split_dims, self._layers[name]) for name, factors in sums.items()}
            choice = choose(self._layers, losses, split_dims) if losses else None
        except (ValueError, RuntimeError) as error:  # statistics have overflowed, or memory was too small
            return _fall_back(str(error))
        if choice is None:
            return _fall_back("the first step brought no statistics")
        try:
            cache.store(self._layers, choice)
        except OSError as error:
            warnings.warn(
                f"THOR: split_dim='auto' chose {choice.split_dim}, and could not keep it for the next training: "
                f"{error}; set TORCH_THOR_CACHE to a folder that can be written",
                RuntimeWarning,
                stacklevel=4,
            )
        return choice.split_dim

    def _settle(self, split_dim: int) -> None:
        for group in self._groups:
            group["split_dim"] = split_dim
        for layer in self._layers.values():
            layer.statistics.cut()
        self._groups = []


def _fall_back(reason: str) -> int:
    warnings.warn(
        f"THOR: split_dim='auto' takes {FALLBACK}, the paper's choice for ResNet-50, because {reason}; pass a "
        f"number to choose yourself (torch-thor split-dim measures one)",
        RuntimeWarning,
        stacklevel=5,
    )
    return FALLBACK
