"""Schedules of learning rate and damping, as in the reference trainings.

There are the formulas of those trainings, and a scheduler of damping.

.. code-block:: python

    lr = LambdaLR(optimizer, lambda step: resnet50_lr(step, 5004, lr=1.0))
    damping = LambdaDamping(optimizer, lambda step: resnet50_damping(step, 5004, damping=1.0))
    ...
    optimizer.step()
    lr.step()
    damping.step()

The formulas depend only on the step, which is the number of steps already taken: 0 before the
first one. So a resumed run goes on with the same schedule. Warm-up, cosine and the like are torch's
own ``lr_scheduler``, whose formulas ``LambdaDamping`` takes too. ``OneCycleLR`` overwrites momentum
unless it gets ``cycle_momentum=False``.
"""

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from torch_thor.errors import require


def resnet50_lr(
    step: int,
    steps_per_epoch: float,
    *,
    lr: float = 0.05803,
    decay: float = 4.0839,
    epochs: float = 53,
    decay_epochs: float | None = 39,
) -> float:
    """Return the learning rate of THOR's ResNet-50, ``lr · (1 − e/E)^decay``.

    Here ``e = (step + 1) / steps_per_epoch``.

    Args:
        step: steps already taken.
        steps_per_epoch: n, the number of optimizer steps in an epoch.
        lr: the value at e = 0. The defaults are those of 8 devices with batches of 32 (MindSpore
            2.10, ``thor``).
        decay: the exponent.
        epochs: E, the epoch at which it would be 0; the reference stops before, after 45 epochs.
        decay_epochs: the epoch from which on it is halved, and from the next epoch on again; None:
            never.

    Returns:
        The learning rate of the next step.
    """
    e = (step + 1) / steps_per_epoch
    halvings = 0 if decay_epochs is None else (e >= decay_epochs) + (e >= decay_epochs + 1)
    # rounding must not make it negative at E
    return lr * math.ldexp(math.pow(max(0.0, 1.0 - e / epochs), decay), -halvings)


def resnet50_damping(
    step: int, steps_per_epoch: float, *, damping: float = 0.03, rate: float = 0.50036
) -> float:
    """Return the damping of THOR's ResNet-50, ``damping · rate^(e / 10)``.

    Here ``e = (step + 1) / steps_per_epoch``.

    Args:
        step: steps already taken.
        steps_per_epoch: n, the number of optimizer steps in an epoch.
        damping: the value at e = 0.
        rate: the factor for ten epochs.

    Returns:
        The damping of the next step.
    """
    return damping * float(rate ** ((step + 1) / steps_per_epoch / 10.0))


def polynomial(step: int, total_steps: int, *, start: float, end: float, power: float) -> float:
    """Return a value that falls from ``start`` to ``end`` polynomially.

    It is ``end + (start − end) · (1 − step / total)^power``.

    THOR's BERT-large has it for both: ``start=6.464e-3, end=1e-6, power=2`` for lr and
    ``start=7.035e-3, end=1e-6, power=4`` for damping, over 30,000 steps.

    Args:
        step: steps already taken; from ``total_steps`` on the value stays at ``end``.
        total_steps: the step at which ``end`` is reached.
        start: the value of the first step.
        end: the last value.
        power: the exponent.

    Returns:
        The value of the next step.
    """
    return end + (start - end) * math.pow(1.0 - min(step, total_steps) / total_steps, power)


class LambdaDamping:
    """Drives every group's ``damping`` as ``torch.optim.lr_scheduler.LambdaLR`` drives ``lr``.

    A group keeps the damping that it had at first as ``initial_damping``. A group that is added
    later starts at the present step of the schedule. Where each group has a function of its own,
    there is none for a later group, which keeps its damping.

    Args:
        optimizer: THOR or ThorMuon.
        damping_lambda: from the number of steps taken to the factor on the damping that each group
            has now; or one for each group.

    Raises:
        ValueError: the groups have no damping, or there are not as many functions as groups.
    """

    def __init__(
        self,
        optimizer: Any,
        damping_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
    ) -> None:
        groups = optimizer.param_groups
        require(
            all("damping" in group for group in groups),
            f"LambdaDamping({type(optimizer).__name__}): its parameter groups must have a "
            "damping; give THOR or ThorMuon",
        )
        require(
            callable(damping_lambda) or len(damping_lambda) == len(groups),
            f"damping_lambda must be a function, or a list of {len(groups)}, with one for each "
            "parameter group",
        )
        self.optimizer, self.last_epoch = optimizer, -1
        self._functions: Any = (
            repeat(damping_lambda) if callable(damping_lambda) else damping_lambda
        )
        self.step()

    def step(self) -> None:
        """Set the damping of the next step; call it after ``optimizer.step()``."""
        groups, epoch = self.optimizer.param_groups, self.last_epoch + 1
        # a function of the user may raise an error: nothing is changed before all have answered
        pairs = zip(groups, self._functions, strict=False)
        factors = [float(function(epoch)) for _, function in pairs]
        for group, factor in zip(groups, factors, strict=False):
            group["damping"] = factor * group.setdefault("initial_damping", float(group["damping"]))
        self.last_epoch = epoch

    def get_last_damping(self) -> list[float]:
        """Return the damping of each group.

        Returns:
            The values that the latest ``step`` has set.
        """
        return [float(group["damping"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; functions are not part of it.

        Returns:
            ``last_epoch`` and ``base_dampings``.
        """
        groups = self.optimizer.param_groups
        bases = [group.get("initial_damping", group["damping"]) for group in groups]
        return {"last_epoch": self.last_epoch, "base_dampings": bases}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state dict was saved.

        The groups' damping comes from their own state dict. Groups that the state dict does not
        know count as added later.

        Args:
            state_dict: a result of ``state_dict``.

        Raises:
            ValueError: it belongs to another schedule; nothing has changed.
        """
        require(
            state_dict.keys() >= {"last_epoch", "base_dampings"},
            "this is not the state dict of a LambdaDamping, which has 'last_epoch' and "
            f"'base_dampings': found {', '.join(map(repr, state_dict))}; pass what its "
            "state_dict() gave",
        )
        self.last_epoch = state_dict["last_epoch"]
        groups, bases = self.optimizer.param_groups, state_dict["base_dampings"]
        for group, base in zip(groups, bases, strict=False):
            group["initial_damping"] = base
