"""An average of the steps, so that no schedule is needed.

Parameters hold y, where gradients are taken, and the state holds z, which takes the steps:

    z ← z - lr · d(∇ at y)
    x ← x + c (z - x)              c = lr² / Σ lr² of the steps so far
    y = (1 - β_t) z + β_t x        β_t = 1 - 0.2 · min(1, 100 / t)^0.3

This is Schedule-Free (Defazio et al. 2024), with the growing β_t of AMUSE (arXiv 2605.22432). The
average x follows from y and z; only for parameters of less than single precision, in which small
changes of an average would be lost, the state holds it too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from torch_thor.curvature.view import local
from torch_thor.optim.batches import Batch, Rows, with_gradients
from torch_thor.optim.model_argument import Group, States


def share_of_average(steps: int) -> float:
    """Return β_t, with which y is formed after some steps."""
    return 1.0 - 0.2 * float(min(1.0, 100 / max(1, steps)) ** 0.3)


def of_last_step(rows: Rows) -> Rows:
    """Return rows whose steps z takes; their average is in the parameter, or in the state."""
    average = local(rows.state["x"]) if "x" in rows.state else rows.local
    return replace(rows, local=local(rows.state["z"]), average=average)


def averaged(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Give batches the gradients of this step; when a batch has stepped, move its parameters."""
    moved: dict[int, Group] = {}
    for batch in with_gradients(batches):
        group, moved[id(batch.group)] = batch.group, batch.group
        weight = float(group["lr"]) ** 2
        c = weight / (group["lr_squares"] + weight) if weight else 0.0
        before, after = (share_of_average(group["step"] + n) for n in (0, 1))
        in_state = "x" in batch.states[0]
        if not in_state:  # x ← (y - (1 - β) z) / β
            torch._foreach_lerp_(batch.averages, batch.weights, 1 - 1 / before)
        yield batch
        # x ← x + c (z - x), and where the parameters hold it y ← (1 - β) z + β x
        beta = 1.0 if in_state else after
        torch._foreach_lerp_(batch.averages, batch.weights, 1 - beta * (1 - c))
        if in_state:
            trained = zip(batch.parameters, batch.averages, batch.weights, strict=True)
            for parameter, x, z in trained:
                local(parameter).copy_(torch.lerp(x, z, 1 - after))
    for group in moved.values():
        group["lr_squares"] += float(group["lr"]) ** 2


@torch.no_grad()
def show(groups: Iterable[Group], states: States, *, average: bool) -> None:
    """Put x, or y, into the parameters."""
    for group in groups:
        beta = share_of_average(group["step"])
        trained = [p for p in group["params"] if "z" in states.get(p, {})]
        for parameter in trained if group["shows_average"] != average else ():
            state = states[parameter]
            from_z = 0.0 if "x" in state else 1 - 1 / beta
            shown = torch.lerp(
                local(state.get("x", parameter)),
                local(state["z"]),
                from_z if average else 1 - beta,
            )
            local(parameter).copy_(shown)
        group["shows_average"] = average
