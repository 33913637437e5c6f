"""The network model of `torch-thor plan`: links with a latency and a bandwidth, and the time of a collective on them.

A collective on `p` processes is a ring of `p − 1` rounds, in each of which every process sends to its neighbour:
`T = (p − 1) α + bytes / β`. If the links inside a node and between nodes differ, it is a ring inside of each node and
then a ring of the processes with the same place in their nodes.
"""

import re
from dataclasses import dataclass

from torch_thor.training.errors import UserError
from torch_thor.training.reports.traffic import Collective

DEVICES_PER_NODE = 8
_UNITS = {"MB": 1e6, "GB": 1e9, "us": 1e-6, "ms": 1e-3}
_LINK = re.compile(r"(\d+(?:\.\d+)?)(MB|GB)/s@(\d+(?:\.\d+)?)(us|ms)")


@dataclass(frozen=True)
class Link:
    """The connection of one device.

    Args:
        bandwidth: β, the bytes that it sends in a second.
        latency: α, the seconds of one round of a ring in addition to those of its bytes.
    """

    bandwidth: float
    latency: float

    def ring(self, sent: float, processes: int, rounds: int = 1) -> float:
        """Return the time of rings one after the other.

        Args:
            sent: Bytes that each process sends in all of them.
            processes: Number of processes.
            rounds: Number of rings.

        Returns:
            Seconds.
        """
        return rounds * (processes - 1) * self.latency + sent / self.bandwidth


# Nominal bandwidths in one direction of one device; latencies of NCCL's cost model (see docs/how-to/plan.md).
LINKS = {
    "pcie4": Link(31.5e9, 5.7e-6),
    "pcie5": Link(63e9, 5.7e-6),
    "nvlink3": Link(300e9, 3.4e-6),
    "nvlink": Link(450e9, 3.4e-6),
    "100g": Link(12.5e9, 14e-6),
    "200g": Link(25e9, 14e-6),
    "400g": Link(50e9, 14e-6),
}
SYNTAX = (
    "LINK, or INSIDE+BETWEEN for links inside a node and between nodes, or INSIDE+BETWEEN:N for N devices in a node "
    f"(default: {DEVICES_PER_NODE}); each link is a name or a bandwidth and a latency, as 12.5GB/s@5us"
)


@dataclass(frozen=True)
class Interconnect:
    """How the devices of a training are connected.

    Args:
        word: As the user gave it.
        inside: The link of a device inside its node.
        between: The link of a device between nodes; the same as `inside` if there is one kind.
        node: Number of devices in a node.
    """

    word: str
    inside: Link
    between: Link
    node: int

    def seconds(self, one: Collective, processes: int) -> float:
        """Predict the time of a collective.

        Args:
            one: The collective.
            processes: Number of processes. The last node may have fewer than the others; this makes no difference here.

        Returns:
            Seconds, from the nominal bandwidth: the collective is alone on the links.
        """
        if processes == 1:
            return 0.0
        rings = 2 if one.name == "all_reduce" else 1
        in_node = min(self.node, processes)
        nodes = -(-processes // in_node)
        if one.name == "broadcast":  # in a pipeline: all bytes pass through each link
            slowest = self.between if nodes > 1 else self.inside
            rounds = (in_node - 1) * self.inside.latency + (nodes - 1) * self.between.latency
            return rounds + one.given / slowest.bandwidth
        whole = max(one.given, one.received)
        found = self.inside.ring(rings * whole * (in_node - 1) / in_node, in_node, rings)
        piece = whole / in_node
        return found + self.between.ring(rings * piece * (nodes - 1) / nodes, nodes, rings)


def parse_interconnect(word: str) -> Interconnect:
    """Read an interconnect.

    Args:
        word: A link, `INSIDE+BETWEEN` or `INSIDE+BETWEEN:N`; a link is a name or `12.5GB/s@5us`.

    Returns:
        The interconnect.

    Raises:
        UserError: If it is something else.
    """
    links, colon, count = word.strip().partition(":")
    parts = [_link(part) for part in links.split("+")]
    known = [part for part in parts if part is not None]
    fits = len(known) == len(parts) <= 2 and (not colon or (len(parts) == 2 and count.isdecimal() and int(count) > 0))
    if not fits:
        raise UserError(f"--interconnect={word}: must be {SYNTAX}. Known names: {', '.join(LINKS)}")
    return Interconnect(word.strip(), known[0], known[-1], int(count) if colon else DEVICES_PER_NODE)


def link_lines() -> str:
    """Describe the named links, for the help of the command.

    Returns:
        One item of a list for each of them.
    """
    return "\n\n".join(
        f"- `{name}`: {link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} µs" for name, link in LINKS.items()
    )


def _link(word: str) -> Link | None:
    if word in LINKS:
        return LINKS[word]
    found = _LINK.fullmatch(word)
    if found is None or not float(found[1]):
        return None
    return Link(float(found[1]) * _UNITS[found[2]], float(found[3]) * _UNITS[found[4]])
