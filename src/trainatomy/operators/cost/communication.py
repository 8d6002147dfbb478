"""Collectives, whose cost is that of the links between the GPUs.

The duration of a collective: NCCL's own model of its algorithms, times what was measured relative to it.

NCCL predicts each of its algorithms (ring, tree, multicast) and protocols (LL, LL128, Simple) as a latency plus bytes
over a bandwidth, and runs the fastest (src/graph/tuning.cc; the figures are in ``catalog/links.yaml``).  This module
computes the same.  Where collectives were measured, the ratio of measured to computed time is interpolated between
the points of the same link and collective, so that it carries over to other sizes, groups and links.

Simplified: one communicator uses its links alone, and the graph that NCCL searches for on the machine is replaced by
its outcome on usual machines (bandwidth and channels of ``links.yaml``).

Multiprocessors and memory bandwidth that a collective takes from the kernels beside it.

A kernel of NCCL has one block of threads for each channel and keeps the multiprocessors of its blocks for itself, so
that other kernels run on the rest.  What passes through the GPU is written to its memory and read from it.  The numbers
of channels are those of usual machines, with NCCL's own rules for small messages and networks (``taken`` of
``catalog/links.yaml``).  Copies between the GPUs of one process use copy engines and take no multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import exp, log, log2
from typing import Any, NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.links import Link, Links, Point, bus_bytes, points_of
from trainatomy.lookup import mean_of_nearest
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, name_of, number
from trainatomy.results.operations import Call

_PROTOCOLS = ("LL", "LL128", "Simple")
_SOFTENING = 0.05
"""Added to squared distances between points (in doublings), so that one at distance 0 does not silence the others."""
_OTHER_ALGORITHM = 2.0
"""Distance (in doublings) between points of different algorithms."""
_GIGA = 1e9
_MICRO = 1e-6


class Estimate(NamedTuple):
    """NCCL's own estimate: the algorithm that it would choose, its latency, and the seconds of transfer."""

    algorithm: str
    latency: float
    transfer: float

    @property
    def seconds(self) -> float:
        """Time of the collective."""
        return self.latency + self.transfer


@lru_cache(maxsize=65536)
def collective_seconds(collective: str, size: int, ranks: int, nodes: int, links: Links) -> float:
    """Return how long a collective takes.

    Args:
        collective: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv
            or barrier; one of another name counts as an all-reduce.
        size: Bytes of the whole message, as nccl-tests counts it.
        ranks: GPUs that take part.
        nodes: Machines that they are in.
        links: Links between them.
    """
    if ranks < 2:
        return 0.0
    group = Group(links, ranks, nodes)
    found = estimate(collective, max(size, 1), group)
    return found.seconds * _ratio(collective, found, group)


class Group:
    """A group of GPUs, as far as NCCL's model depends on it.

    Attributes:
        ranks: Number of GPUs.
        nodes: Number of machines.
        per_node: GPUs in each machine.
        intra: Link inside a machine.
        inter: Link between machines, None inside one.
        bandwidth: Bytes per second that pass through the slowest part of a ring of all GPUs, all channels together.
    """

    def __init__(self, links: Links, ranks: int, nodes: int) -> None:
        """Describe a group that is spread evenly over its machines."""
        self.links, self.ranks, self.nodes = links, ranks, nodes
        self.per_node = max(ranks // nodes, 1)
        self.intra = links.within(self.per_node)
        self.inter = links.inter if nodes > 1 else None
        inside = [self.intra.bytes_per_second] if self.per_node > 1 or self.inter is None else []
        between = [] if self.inter is None else [self.inter.bytes_per_second * self.per_node]
        self.bandwidth = min(inside + between)

    @property
    def link(self) -> Link:
        """The link that decides: between machines, if the group spans several."""
        return self.intra if self.inter is None else self.inter

    def figure(self, *path: str) -> Any:
        """Return one of NCCL's figures for this generation of GPUs."""
        found = read_yaml("links.yaml")["nccl"]
        for key in (*path, self.links.generation):
            found = found[key]
        return found[min(self.nodes, 3) - 1] if isinstance(found, list) else found

    def steps(self, algorithm: str, protocol: str) -> tuple[float, float]:
        """Return the seconds of a step inside a machine and of one between machines."""
        table = read_yaml("links.yaml")["nccl"]["step_us"]
        inside = table[self.intra.kind].get(algorithm, {}).get(protocol, 0.0) * _MICRO
        if self.inter is None:
            return inside, 0.0
        between = table["network"]["tree" if self.per_node == 1 else algorithm][protocol] * _MICRO
        return inside, between + self.inter.latency * (2 if protocol == "Simple" else 1)


def estimate(collective: str, size: int, group: Group, algorithm: str = "") -> Estimate:
    """Return NCCL's estimate for the algorithm that it would choose, or for a given one."""
    if collective in ("send", "recv", "all_to_all", "gather", "scatter"):
        return _point_to_point(collective, size, group)
    if collective not in ("all_gather", "reduce_scatter", "broadcast", "reduce"):
        collective = "all_reduce"
    options = [one for one in _options(collective, size, group) if algorithm in ("", one.algorithm)]
    return min(options, key=lambda one: one.seconds)


def _options(collective: str, size: int, group: Group) -> Iterator[Estimate]:
    """Yield the estimate of each algorithm and protocol that NCCL may choose."""
    for protocol in _PROTOCOLS:
        if protocol != "LL128" or group.intra.kind == "nvlink":
            yield _ring(collective, size, group, protocol)
            if collective == "all_reduce":
                yield _tree(size, group, protocol)
    if group.intra.multicast and group.ranks > 2 and group.per_node > 1 and collective not in ("broadcast", "reduce"):
        if group.nodes == 1:
            yield _multicast(collective, size, group)
        elif collective == "all_reduce":
            yield _multicast_tree(size, group)


def _ring(collective: str, size: int, group: Group, protocol: str) -> Estimate:
    ranks, nodes = group.ranks, group.nodes
    speed = group.bandwidth
    if protocol == "LL":
        speed = min(speed / 2, group.figure("ll_limit") * _GIGA)
    elif protocol == "LL128":
        speed = min(speed * 0.92, _limit(group, "ring_ll128"))
    base = read_yaml("links.yaml")["nccl"]["base_us"]["ring"][protocol] * _MICRO
    inside, between = group.steps("ring", protocol)
    if collective in ("broadcast", "reduce"):
        return Estimate("ring", base + max(inside, between), size / speed)
    rounds = 2 if collective == "all_reduce" else 1
    if nodes > 1:
        overhead = read_yaml("links.yaml")["nccl"]["network_overhead_us"] * _MICRO
        inside = max(inside, overhead * (3 if protocol == "Simple" else 1))
    crossings = rounds * (nodes - 1)
    latency = base + (rounds * (ranks - 1) - crossings) * inside + crossings * between
    if protocol == "Simple" and nodes > 1 and rounds == 2 and size / (group.figure("channels") * ranks) >= 64:
        latency *= group.figure("plateau")
    return Estimate("ring", latency, size * rounds * (ranks - 1) / ranks / speed)


def _tree(size: int, group: Group, protocol: str) -> Estimate:
    nccl = read_yaml("links.yaml")["nccl"]
    speed = min(group.bandwidth * 0.92, _limit(group, "tree"))
    if protocol == "LL":
        speed = min(speed / 3.8, group.figure("ll_limit") * _GIGA)
    elif protocol == "LL128":
        speed = min(speed * (7 / 9 if group.nodes == 1 else 120 / 128), _limit(group, "tree_ll128"))
    inside, between = group.steps("tree", protocol)
    base = nccl["base_us"]["tree"][protocol] * _MICRO
    latency = base + 2 * ((group.per_node - 1) * inside + int(log2(group.nodes)) * between)
    return Estimate("tree", latency, size / (speed * 0.5 * _correction(size, protocol)))


def _multicast(collective: str, size: int, group: Group) -> Estimate:
    speed = _multicast_speed(group)
    inside, _ = group.steps("nvls", "Simple")
    if collective == "all_reduce":
        return Estimate("nvls", inside, size * (group.ranks - 1) / group.ranks / speed)
    return Estimate("nvls", inside, size / (speed * (group.per_node - 1) / group.per_node))


def _multicast_tree(size: int, group: Group) -> Estimate:
    assert group.inter is not None
    network = group.inter.bytes_per_second * group.per_node * (2 if group.nodes == 2 else 1)
    speed = min(2 * _multicast_speed(group), network, _limit(group, "nvls_tree"))
    if group.links.generation == "blackwell":
        speed *= _correction(size, "Simple")
    inside, between = group.steps("nvls_tree", "Simple")
    latency = inside + 2 * int(log2(group.nodes)) * between
    return Estimate("nvls_tree", latency, size * 2 * (group.ranks - 1) / group.ranks / speed)


def _multicast_speed(group: Group) -> float:
    """Return the bandwidth of a switch that reduces and multiplies; an all-reduce pipelines both directions."""
    channels = read_yaml("links.yaml")["nccl"]["multicast_channels"]
    share: float = group.figure("multicast_share")
    return float(group.intra.bytes_per_second * share * (channels - 1) / channels)


def _point_to_point(collective: str, size: int, group: Group) -> Estimate:
    """Return the estimate of what NCCL does by sends and receives: all at once, over the links of one GPU.

    NCCL has no model of these; their latency is that of one step of a ring.
    """
    base = read_yaml("links.yaml")["nccl"]["base_us"]["ring"]["Simple"] * _MICRO
    inside, between = group.steps("ring", "Simple")
    local = group.per_node if collective not in ("send", "recv") else group.per_node if group.inter is None else 1
    parts = 1 if collective in ("send", "recv") else group.ranks
    leaving = (group.ranks - local) / parts if parts > 1 else float(group.inter is not None)
    staying = (local - 1) / parts if parts > 1 else float(group.inter is None)
    times = [staying * size / group.intra.bytes_per_second]
    if group.inter is not None:
        times.append(leaving * size / group.inter.bytes_per_second)
    return Estimate("p2p", base + max(inside, between), max(times))


def _limit(group: Group, name: str) -> float:
    """Return the bytes per second of all channels where one channel has a limit."""
    limit: float = group.figure("channels") * group.figure("channel_limits", name) * _GIGA
    return limit


def _correction(size: int, protocol: str) -> float:
    """Return the factor by which NCCL corrects the bandwidth of trees for messages of medium size."""
    table = read_yaml("links.yaml")["nccl"]["tree_correction"][protocol]
    place = int(log2(max(size // 64, 1)))
    factor: float = table[place] if place < len(table) else 1.0
    return factor


# -- measured points ---------------------------------------------------------------------------------------------------


def _ratio(collective: str, found: Estimate, group: Group) -> float:
    """Return measured over estimated time, interpolated between measured points; 1 where none applies."""
    own = tuple(point for point in group.links.measured if (point.nodes > 1) == (group.nodes > 1))
    points = _relevant_points(collective, group.link, own)
    if not points:
        return 1.0
    return exp(mean_of_nearest(((_distance(found, group.ranks, one), one.log_ratio) for one in points), _SOFTENING))


class _Measured(NamedTuple):
    """A measured point beside NCCL's estimate of it; ``log_ratio``: log(measured / estimated)."""

    estimate: Estimate
    ranks: int
    log_ratio: float


def _distance(found: Estimate, ranks: int, point: _Measured) -> float:
    """Return the squared distance to a point, in doublings of the time of transfer and of the group."""
    longer = log2(max(found.transfer / _MICRO, 1.0)) - log2(max(point.estimate.transfer / _MICRO, 1.0))
    other = _OTHER_ALGORITHM if found.algorithm != point.estimate.algorithm else 0.0
    return longer**2 + log2(ranks / point.ranks) ** 2 + other**2


@lru_cache(maxsize=512)
def _relevant_points(collective: str, link: Link, measured: tuple[Point, ...]) -> tuple[_Measured, ...]:
    """Return the points that say something about a collective over a link.

    The user's own come first, those of the collective if there are any. Else they are the link's of the collective,
    those of the link that it resembles, or all of the one or the other.
    """
    own, alike = points_of(link.id), points_of(link.like)
    for points in (measured, own, alike):
        if chosen := [point for point in points if point.collective == collective] or measured:
            return tuple(map(_measured, chosen))
    return tuple(map(_measured, own or alike))


def _measured(point: Point) -> _Measured:
    found = estimate(point.collective, point.bytes, Group(point.links, point.ranks, point.nodes), point.algorithm)
    return _Measured(found, point.ranks, log(point.seconds / found.seconds))


_POINT_TO_POINT = frozenset({"send", "recv", "all_to_all", "gather", "scatter"})
_SINCE_HOPPER = ("hopper", "blackwell")


class Taken(NamedTuple):
    """Share of the GPU that collectives take while they run; two that run at once take the sum."""

    multiprocessors: int = 0
    bytes_per_second: float = 0.0

    def __add__(self, other: tuple[Any, ...]) -> Taken:
        """Return what both take."""
        return Taken(self.multiprocessors + other[0], self.bytes_per_second + other[1])


def taken_by(call: Call, seconds: float, chip: Chip) -> Taken | None:
    """Return what a collective that takes ``seconds`` takes from other kernels; None for any other call."""
    if chip.links is None or not call.name.startswith("nccl::") or not seconds:
        return None
    size, ranks, nodes = (int(number(call, name, "1")) for name in ("bytes", "ranks", "nodes"))
    kind = name_of(call)
    passes = read_yaml("links.yaml")["taken"]["memory_passes"]["reducing" if "reduce" in kind else "other"]
    return Taken(channels(kind, size, Group(chip.links, ranks, nodes)), passes * bus_bytes(kind, size, ranks) / seconds)


def channels(collective: str, size: int, group: Group) -> int:
    """Return how many channels NCCL uses for a collective; ``size`` in bytes of the whole message."""
    facts = read_yaml("links.yaml")["taken"]
    if collective in _POINT_TO_POINT:
        crosses = collective in ("send", "recv") and group.inter is not None
        most = int(facts["card_peer_channels" if crosses else "peer_channels"])
    elif estimate(collective, max(size, 1), group).algorithm.startswith("nvls"):
        return int(read_yaml("links.yaml")["nccl"]["multicast_channels"])
    else:
        most = _ring_channels(group)
    return max(min(most, size // int(facts["channel_bytes"])), 1)


def _ring_channels(group: Group) -> int:
    """Return the channels of a ring: those inside a machine, or as many as its network cards keep busy."""
    content = read_yaml("links.yaml")
    inside: int = content["memory"]["channels"].get(group.intra.kind, 1)
    if group.inter is None:
        return inside
    facts, entry = content["taken"], content["links"].get(group.inter.id, {})
    cards = entry.get("cards", 1) if entry.get("per") == "machine" else group.per_node
    between: int = facts["channels_per_card"] * cards
    if between < facts["doubled_below"] and group.links.generation in _SINCE_HOPPER:
        between *= 2
    return min(inside, between) if group.per_node > 1 else between


def collective(call: Call, chip: Chip) -> KernelWork:
    """Return the work of one collective; its time is computed from the links alone."""
    if chip.links is None:
        return NOTHING
    size, ranks, nodes = (int(number(call, name, "1")) for name in ("bytes", "ranks", "nodes"))
    kind = name_of(call)
    seconds = collective_seconds(kind, size, ranks, nodes, chip.links)
    return KernelWork(f"communication.{kind}", seconds=seconds) if seconds else NOTHING


def peer_copy(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a copy between the memories of two GPUs of one machine."""
    if chip.links is None:
        return NOTHING
    seconds = collective_seconds("send", int(number(call, "bytes", "1")), 2, 1, chip.links)
    return KernelWork("communication.peer_copy", seconds=seconds)
