"""State dicts of an optimizer whose curvature is divided among processes (``divide_curvature=True``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torch_thor.curvature.layer_state import SHARDS
from torch_thor.optim.divided_curvature import whole_entries
from torch_thor.optim.joint_training import JointTraining
from torch_thor.optim.saved_rows import join_blocks


class Consolidation(JointTraining):
    """The part of THOR that collects divided curvature for state dicts, and loads them."""

    # the steps of all groups, and by the id of a parameter the entries of its state that other processes divide
    _whole: tuple[list[int], dict[int, dict[str, Tensor]]] | None = None

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the curvature that is divided among the processes, for the next :meth:`state_dict`."""
        self._whole = None
        if not self._is_divided():
            return
        index, rank = self._registry.index, self._processes().rank
        index.update(self.param_groups, self.state)
        found: dict[int, dict[str, Tensor]] = {}
        for layer, entries in whole_entries(list(self._registry.layers.values())):
            if to is None or rank == to:
                of_parameter = found.setdefault(id(layer.weight_view.parameter), {})
                of_parameter.update({key: tensor.cpu() for key, tensor in entries.items()})
        if to is not None and rank != to:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                layers = [share.layer for share in index.shares(parameter) if share.is_weight]
                side = layers[0].stored.whole_side_by_rows if layers else None
                if side is not None and all(side in layer.stored.owners for layer in layers):
                    shape = len(parameter), layers[0].stored.width(side)
                    for name in (side, f"{side}_inverse"):
                        join_blocks(found[id(parameter)], name, layers, shape)
        self._whole = [int(group["step"]) for group in self.param_groups], found

    def _is_divided(self) -> bool:
        return any(layer.stored.owners for layer in self._registry.layers.values())

    def _check_whole(self) -> None:
        """Raise an error if the curvature is divided and was not collected on this process since the last step."""
        steps = [int(group["step"]) for group in self.param_groups]
        if self._is_divided() and (self._whole is None or self._whole[0] != steps):
            raise RuntimeError(
                "the curvature is divided among the processes (divide_curvature=True), and this one has a part of it: "
                "call optimizer.consolidate_state_dict(to=RANK) on all processes after the last step, then "
                "state_dict() on that rank; with torch.distributed.checkpoint, to=None and state_dict() on all"
            )

    @contextmanager
    def _with_whole_state(self) -> Iterator[None]:
        """Replace the state by one in which nothing is divided."""
        self._check_whole()
        if not self._is_divided() or self._whole is None:
            yield
            return
        state: Any = self.state
        replaced = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                entries, whole = state.get(parameter), self._whole[1].get(id(parameter))
                if entries is None or whole is None:
                    continue
                layers = [share.layer for share in self._registry.index.shares(parameter) if share.is_weight]
                divided = {key for layer in layers for key in layer.stored.divided_keys()}
                replaced[parameter] = entries
                state[parameter] = {key: value for key, value in entries.items() if key not in divided} | whole
                if layers[0].stored.whole_side_by_rows:
                    state[parameter].setdefault(SHARDS, 1)
        try:
            yield
        finally:
            state.update(replaced)

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Take whole tensors as the state from here on, unless the block raises an error."""
        before = [(layer.stored, layer.stored.owners) for layer in self._registry.layers.values()]
        for stored, _ in before:
            stored.owners = {}
        try:
            yield
        except BaseException:
            for stored, owners in before:
                stored.owners = owners
            raise
        self._whole = None
