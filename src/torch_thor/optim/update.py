"""The parts of THOR's step, each from batches with directions to batches with directions."""

from collections.abc import Iterator
from operator import itemgetter

import torch
from torch import Tensor

from torch_thor.curvature.blocks import to_device
from torch_thor.curvature.communication import Processes
from torch_thor.optim.batches import Batch, Binding, dense, momentum_, trust_ratios

Directions = Iterator[tuple[Batch, list[Tensor]]]  # what a step is to follow, batch by batch


def with_decay(directions: Directions) -> Directions:
    """Add ``weight_decay · W``."""
    for batch, d in directions:
        decay = float(batch.group["weight_decay"])
        if decay:
            torch._foreach_add_(d, batch.weights, alpha=decay)
        yield batch, d


def with_momentum(directions: Directions) -> Directions:
    """Add directions to the momentum, as ``torch.optim.SGD`` does."""
    for batch, d in directions:
        momentum = float(batch.group["momentum"])
        # one pass over memory, with one rounding; SGD's two take two
        if momentum and batch.is_single:
            v = batch.moments[0][0]
            d = [torch.add(d[0], v, alpha=momentum, out=v)]
        elif momentum:
            d = momentum_(batch, d)
        yield batch, d


# Elements of a direction: copying so many is cheaper than a kernel of their own.
_SMALL = 2**16


def within_ratio(directions: Directions) -> Directions:
    """Shorten directions so that ``lr ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out)`` for each parameter."""
    for batch, d in directions:
        ratio, lr = batch.group["max_update_ratio"], float(batch.group["lr"])
        if ratio is not None and batch.group["kl_clip"] is None and lr:
            (_shorten_on_cpu if batch.on_cpu else _shorten_on_device)(batch, d, lr, float(ratio))
        yield batch, d
        for stack in batch.stacks:
            stack.result = None  # the memory of the directions


def _shorten_on_cpu(batch: Batch, d: list[Tensor], lr: float, ratio: float) -> None:
    """Shorten directions one by one: on a CPU a number costs nothing to look at."""
    for i, direction in enumerate(d):
        scale = _trust_ratio(direction, batch.weights[i], batch.smallest[i], lr, ratio)
        # the gradient of a plain parameter may be its direction, and stays as it is
        if scale != 1.0:
            d[i] = direction.mul_(scale) if batch.stacks else direction * scale


def _trust_ratio(
    direction: Tensor, weight: Tensor, smallest: float, lr: float, ratio: float
) -> float:
    """Return the number by which a direction is multiplied."""
    length = lr * float(torch.linalg.vector_norm(direction, dtype=direction.dtype))
    longest_step = ratio * smallest
    # then the norm of the weight, which can only raise the bound, is not needed
    if length <= longest_step:
        return 1.0
    longest_step = max(
        longest_step, ratio * float(torch.linalg.vector_norm(weight, dtype=direction.dtype))
    )
    return 1.0 if length <= longest_step else longest_step / length


def _shorten_on_device(batch: Batch, d: list[Tensor], lr: float, ratio: float) -> None:
    """Shorten directions with few kernels, and none that is waited for."""
    # in the dtype of the directions: a norm in half precision has 3 digits
    norms = list(torch._foreach_norm(batch.weights, 2, dtype=batch.dtype))
    ratios = trust_ratios(norms, batch.smallest, [ratio / lr] * len(d), torch._foreach_norm(d))
    rest = dict(enumerate(ratios))
    for stack in batch.stacks:
        if stack.result is not None:  # the directions of its members are views of it
            of_members = [rest.pop(matrix.index) for matrix in stack.members]
            stack.result.mul_(torch.stack(of_members)[:, None])
    small = [i for i in rest if d[i].is_contiguous() and d[i].numel() <= _SMALL]
    if len(small) > 1:
        _multiply_as_vector(batch, d, {i: rest.pop(i) for i in small})
    if rest:  # the ratios are as many tensors, for which torch has no single kernel
        scaled = torch._foreach_mul([d[i] for i in rest], list(rest.values()))
        for i, direction in zip(rest, scaled, strict=True):
            d[i] = direction


def _multiply_as_vector(batch: Batch, d: list[Tensor], ratios: dict[int, Tensor]) -> None:
    """Multiply small directions (biases, normalisation layers), put together into one vector."""
    sizes = {i: d[i].numel() for i in ratios}
    if batch.owner_in_vector is None or batch.owner_in_vector[0] != sizes:
        owners = [k for k, size in enumerate(sizes.values()) for _ in range(size)]
        batch.owner_in_vector = sizes, to_device(owners, batch.weights[0].device, torch.int64)
    vector = torch.cat([d[i].flatten() for i in ratios])
    vector.mul_(torch.stack(list(ratios.values()))[batch.owner_in_vector[1]])
    for i, direction in zip(ratios, vector.split(list(sizes.values())), strict=True):
        d[i] = direction.view(d[i].shape)


def within_kl_clip(directions: Directions, binding: Binding, processes: Processes) -> Directions:
    """Scale all layers' directions by ``min(1, √(κ / Σ lr² ⟨d, ∇W⟩))`` (Ba et al. 2017, 5)."""
    # the sum is over all processes, all of which must consume this
    clipped: list[tuple[Batch, list[Tensor]]] = []
    # of rows that are divided, and others
    products: dict[bool, list[tuple[int, Tensor]]] = {False: [], True: []}
    for batch, d in directions:
        if batch.group["kl_clip"] is None or not batch.stacks:
            yield batch, d
            continue
        clipped.append((batch, d))
        for i, (direction, gradient) in enumerate(zip(d, batch.gradients, strict=True)):
            product = torch.sum(direction * dense(gradient)) * float(batch.group["lr"]) ** 2
            products[batch.weights[i] is not batch.parameters[i]].append((batch.order[i], product))
    if all(group["kl_clip"] is None for group in binding.groups):
        return
    divergence, of_rows = _sum(products[False]), _sum(products[True])
    if binding.plan.first_shards is not None:
        own = torch.zeros((), device="cpu") if of_rows is None else of_rows
        total = processes.all_reduce(own, "shards")
        divergence = total if divergence is None else total + divergence.to(total)
    for batch, d in clipped:
        assert divergence is not None
        limit = float(batch.group["kl_clip"]) / divergence.clamp(
            min=torch.finfo(divergence.dtype).tiny
        )
        torch._foreach_mul_(d, limit.sqrt().clamp(max=1.0).to(d[0]))
        yield batch, d


def _sum(products: list[tuple[int, Tensor]]) -> Tensor | None:
    """Return the sum of numbers in the order of the model, so that groups do not matter."""
    ordered = [product for _, product in sorted(products, key=itemgetter(0))]
    if not ordered:
        return None
    return torch.stack([product.to(ordered[0].device) for product in ordered]).sum()
