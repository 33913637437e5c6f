"""The tables of `torch-thor plan`."""

from collections.abc import Iterable

from rich.table import Table

from torch_thor.training.reports.plan_divided import DividedShare
from torch_thor.training.reports.plan_division import Share
from torch_thor.training.reports.plan_sharded import ShardedShare
from torch_thor.training.reports.plan_times import Times

MEGABYTE = 10**6


def plan_table(shares: Iterable[Share]) -> Table:
    """Make the table of what a process does and sends under DDP.

    Args:
        shares: What one process does and sends, for each number of processes.

    Returns:
        A table with a row per number of processes.
    """
    headings = ("processes", "blocks to invert", "most work / mean", "sent per refresh", "with unsplit factors")
    table = _table("One process, data-parallel (DDP)", *headings, "gradients sent per step")
    for share in shares:
        sent = (megabytes(size) for size in (share.sent, share.sent_unsplit, share.gradients_sent))
        table.add_row(f"{share.processes:,}", f"{share.blocks:,}", f"{share.imbalance:.2f}", *sent)
    return table


def sharded_table(shares: Iterable[ShardedShare]) -> Table:
    """Make the table of what a process stores and sends under FSDP2.

    Args:
        shares: What the first process stores and sends, for each number of processes.

    Returns:
        A table with a row per number of processes.
    """
    headings = ("processes", "memory", "curvature", "sums of a refresh", "most work / mean")
    table = _table("One process, fully sharded (FSDP2)", *headings, "sent per refresh", "sent per step")
    for one in shares:
        stored = (megabytes(size) for size in (one.memory, one.state_bytes, one.statistics_bytes))
        sent = (megabytes(size) for size in (one.sent, one.weights_sent))
        table.add_row(f"{one.processes:,}", *stored, f"{one.imbalance:.2f}", *sent)
    return table


def divided_table(shares: Iterable[DividedShare]) -> Table:
    """Make the table of what a process stores and sends with `divide_curvature=True` under DDP.

    Args:
        shares: What a process stores and sends, for each number of processes.

    Returns:
        A table with a row per number of processes.
    """
    table = _table(
        "One process, divide_curvature=True (DDP)", "processes", "curvature", "sent per refresh", "sent per step"
    )
    for one in shares:
        table.add_row(f"{one.processes:,}", *map(megabytes, (one.state_bytes, one.sent, one.inverses_sent)))
    return table


def times_table(times: Iterable[Times]) -> Table:
    """Make the table of predicted times.

    Args:
        times: The predictions.

    Returns:
        A table with a row for each of them.
    """
    headings = ("processes", "samples each", "ordinary", "network", "refresh", "network", "epoch")
    table = _table("Predicted times of a step, the part of it that is network, and of an epoch", "", *headings)
    for one in times:
        steps = (one.ordinary, one.ordinary_sending, one.refresh, one.refresh_sending)
        words = (_seconds(seconds) for seconds in steps)
        epoch = "" if one.epoch is None else _seconds(one.epoch)
        table.add_row(one.form, f"{one.processes:,}", f"{one.local_batch:,}", *words, epoch)
    return table


def megabytes(size: int) -> str:
    """Write a size in words.

    Args:
        size: Bytes.

    Returns:
        Megabytes, with one digit.
    """
    return f"{size / MEGABYTE:,.1f} MB"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:,.1f} ms"
    return f"{seconds:,.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
