"""The prediction of `torch-thor plan`: the times of a step and of an epoch, from measured costs and a network model."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_thor.curvature import LayerCurvature
from torch_thor.distributed.ownership import deal_out, packed_size
from torch_thor.training.errors import require
from torch_thor.training.reports.plan_costs import Costs
from torch_thor.training.reports.plan_network import Interconnect
from torch_thor.training.reports.traffic import Blocks, Collective, blocks_of, collectives_of_refresh

BUCKET = 25 * 2**20  # bytes of one collective of gradients or weights, as in DDP
DDP, FSDP = "DDP", "FSDP2"
# FSDP2 copies the collected weights out of its buffer in the forward and the backward pass, and gradients into one
COPIES = 3


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        batch: Number of samples of a step, over all processes.
        interval: Steps from one refresh to the next.
        samples: Number of samples of an epoch; `None` predicts no epochs.
    """

    batch: int
    interval: int
    samples: int | None = None

    def local(self, processes: int) -> int:
        """Return the number of samples of one process.

        Args:
            processes: Number of processes.

        Returns:
            The number of the process that has most.

        Raises:
            UserError: If there are more processes than samples.
        """
        require(self.batch >= processes, f"--batch={self.batch}: {processes} processes need at least as many samples")
        return -(-self.batch // processes)

    def epoch(self, ordinary: float, refresh: float) -> float | None:
        """Return the time of an epoch.

        Args:
            ordinary: Seconds of an ordinary step.
            refresh: Seconds of a step in which all layers take new factors.

        Returns:
            Seconds; `None` if the number of samples is not known.
        """
        if self.samples is None:
            return None
        steps = -(-self.samples // self.batch)
        refreshes = -(-steps // self.interval)
        return refreshes * refresh + (steps - refreshes) * ordinary


@dataclass(frozen=True)
class Times:
    """Predicted times, in seconds.

    Args:
        form: `DDP` or `FSDP2`.
        processes: Number of processes.
        local_batch: Number of samples of one process.
        ordinary: An ordinary step.
        ordinary_sending: The part of it in which the process waits for the network.
        refresh: A step in which all layers take new factors.
        refresh_sending: The part of it in which the process waits for the network.
        epoch: An epoch; `None` if the number of samples is not known.
    """

    form: str
    processes: int
    local_batch: int
    ordinary: float
    ordinary_sending: float
    refresh: float
    refresh_sending: float
    epoch: float | None


def predict(
    layers: Iterable[LayerCurvature],
    gradient_bytes: int,
    processes: int,
    costs: Costs,
    network: Interconnect,
    work: Workload,
    *,
    sharded: bool = False,
) -> Times:
    """Predict the times of steps.

    Args:
        layers: The layers, for FSDP2 as `shard_layers` returns them.
        gradient_bytes: Size of the gradients of the whole model.
        processes: Number of processes.
        costs: What one device takes.
        network: How the devices are connected.
        work: What is trained.
        sharded: Whether the parameters are divided (FSDP2).

    Returns:
        The times. Computation and communication are added: nothing overlaps.
    """
    layers = list(layers)
    samples = work.local(processes)
    computing = costs.forward_backward.at(samples)
    if sharded:
        computing += costs.step / processes + COPIES * costs.copy * gradient_bytes
    else:
        computing += costs.step
    refreshing = costs.refresh.at(samples) + refresh_seconds(blocks_of(layers), processes, costs)
    collectives = parameter_collectives(gradient_bytes, processes, sharded=sharded)
    sending = sum(network.seconds(one, processes) for one in collectives)
    more = collectives_of_refresh(layers, processes) if processes > 1 else []
    sending_more = sum(network.seconds(one, processes) for one in more)
    ordinary, refresh = computing + sending, computing + refreshing + sending + sending_more
    return Times(
        form=FSDP if sharded else DDP,
        processes=processes,
        local_batch=samples,
        ordinary=ordinary,
        ordinary_sending=sending,
        refresh=refresh,
        refresh_sending=sending + sending_more,
        epoch=work.epoch(ordinary, refresh),
    )


def refresh_seconds(blocks: Sequence[Blocks], processes: int, costs: Costs) -> float:
    """Predict how long the process with the longest inversions inverts, packs and unpacks.

    Args:
        blocks: The blocks of all factors.
        processes: Number of processes.
        costs: What one device takes.

    Returns:
        Seconds. Alone, a process packs nothing. With others it packs all sums and those blocks and inverses that it
        owns, and unpacks the sums that it owns and those blocks and inverses that all processes hold. All of this is in
        new memory.
    """
    bounds = deal_out(tuple(one.shape for one in blocks), processes, tuple(one.owners for one in blocks))
    every = shared = whole = 0
    for one in blocks:
        size = one.shape[0] * packed_size(one.shape[1])
        every += size
        whole += one.shape[0] * one.shape[1] ** 2
        shared += size if one.owners is None else 0
    longest = 0.0
    seen: set[tuple[tuple[int, int], ...]] = set()
    for rank in range(processes):
        counts: Counter[int] = Counter()
        own = own_shared = 0
        for one, of_ranks in zip(blocks, bounds, strict=True):
            count = of_ranks[rank + 1] - of_ranks[rank]
            counts[one.shape[1]] += count
            own += count * packed_size(one.shape[1])
            own_shared += count * packed_size(one.shape[1]) if one.owners is None else 0
        key = (*sorted(counts.items()), (-1, own_shared))
        if key in seen:
            continue
        seen.add(key)
        seconds = costs.inverting(counts)
        if processes > 1:
            seconds += costs.pack * (every + 2 * own_shared) + costs.unpack * (own + 2 * shared)
            new = every + own + 2 * (own_shared + shared) + whole  # elements of the buffers, and of all inverses
            seconds += costs.copy * max((one.dtype.itemsize for one in blocks), default=0) * new
        longest = max(longest, seconds)
    return longest


def parameter_collectives(gradient_bytes: int, processes: int, *, sharded: bool) -> list[Collective]:
    """Return the collectives of weights and gradients in every step.

    Args:
        gradient_bytes: Size of the gradients of the whole model, and of its weights.
        processes: Number of processes.
        sharded: Whether the parameters are divided (FSDP2).

    Returns:
        One for each 25 MiB: an all-reduce of the gradients for DDP; for FSDP2 an all-gather of the weights for the
        forward pass, another for the backward pass, and a reduce-scatter of the gradients.
    """
    if processes == 1:
        return []
    sizes = [BUCKET] * (gradient_bytes // BUCKET) + [gradient_bytes % BUCKET]
    found = []
    for size in sizes:
        if not size:
            continue
        piece = -(-size // processes)
        if sharded:
            gather = Collective("all_gather_into_tensor", piece, piece * processes)
            found += [gather, gather, Collective("reduce_scatter_tensor", piece * processes, piece)]
        else:
            found.append(Collective("all_reduce", size, size))
    return found
