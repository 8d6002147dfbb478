"""Multiprocessors and memory bandwidth that a collective takes from the kernels beside it.

A kernel of NCCL has one block of threads for each channel and keeps the multiprocessors of its blocks for itself, so
that other kernels run on the rest.  What passes through the GPU is written to its memory and read from it.  The numbers
of channels are those of usual machines, with NCCL's own rules for small messages and networks (``taken`` of
``catalog/links.yaml``).  Copies between the GPUs of one process use copy engines and take no multiprocessors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.links import bus_bytes
from trainatomy.operators.cost.kernel import Chip, name_of, number
from trainatomy.operators.cost.nccl import Group, estimate
from trainatomy.results.operations import Call

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
