"""Links between the GPUs of a training (``links.yaml``): how fast NCCL takes them to be, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainatomy.catalog.files import close_names, read_yaml
from trainatomy.catalog.gpus import GPU, find_gpu, gpus
from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import CollectivePoint

LinkKind = Literal["nvlink", "pcie", "network"]
Generation = Literal["volta", "ampere", "hopper", "blackwell"]

_SPEED = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(GB/s|Gb/s|B/s|)", re.IGNORECASE)
HOST = "host"
"""Name of the link through host memory, over the PCIe that a GPU has."""
_UNITS = {"": 1.0, "b/s": 1.0, "gb/s": 1e9}
_BITS = 0.125e9


class Point(NamedTuple):
    """A collective that was timed; ``bytes`` as nccl-tests counts them, ``algorithm`` empty where NCCL chose it."""

    collective: str
    bytes: int
    seconds: float
    links: Links
    ranks: int
    nodes: int = 1
    algorithm: str = ""


@dataclass(frozen=True)
class Link:
    """A link between GPUs.

    Attributes:
        id: Key in ``links.yaml``; empty for one that a workload describes by its speed.
        kind: What it is, as far as latency depends on it.
        bytes_per_second: Bandwidth of one GPU, each way, as NCCL counts with it.
        multicast: NVSwitch reduces and multiplies in the switch (NVLS).
        gpus: GPUs that it joins at most; None: all of a machine.
        beyond: Link between more GPUs than that.
        latency: Seconds that each step takes beyond NCCL's own.
        like: Link whose measured points stand in where this one has none.
        buffers_on_gpu: False if NCCL's buffers for it are in host memory.
        source: Source of the figures.
    """

    id: str
    name: str
    kind: LinkKind
    bytes_per_second: float
    multicast: bool = False
    gpus: int | None = None
    beyond: str = ""
    latency: float = 0.0
    like: str = ""
    buffers_on_gpu: bool = True
    source: str = ""


@dataclass(frozen=True)
class Links:
    """The links of a training: between the GPUs of a machine, and between machines (None: there is one machine).

    Attributes:
        generation: Generation of the GPUs, which NCCL's figures depend on.
        gpus_per_node: GPUs of a machine.
        measured: Points of the user's own calibration, which come before those that ship.
        assumed: True if nobody said what the machines are joined by.
    """

    intra: Link
    inter: Link | None = None
    generation: Generation = "hopper"
    gpus_per_node: int = 1
    measured: tuple[Point, ...] = ()
    assumed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the links in use, the one inside a machine first."""
        return tuple(link.name for link in (self.intra, self.inter) if link is not None)

    def within(self, ranks: int) -> Link:
        """Return the link between that many GPUs of one machine."""
        return self.intra if self.intra.gpus is None or ranks <= self.intra.gpus else _link(self.intra.beyond)


def find_link(name: str) -> str:
    """Return ``name`` if a link or a speed (``50 GB/s``, ``400 Gb/s``, bytes per second) is called so.

    Raises:
        WorkloadError: It is neither; the message suggests the nearest names.
    """
    known = [*read_yaml("links.yaml")["links"], HOST]
    if name in known or _speed(name) is not None:
        return name
    near = close_names(name, known) or known
    raise WorkloadError(
        f"unknown link {name!r}; did you mean {' or '.join(near)}? A speed such as '50 GB/s' or '400 Gb/s' is one too"
    )


@lru_cache(maxsize=64)
def links_of(
    gpu: GPU, gpus: int, nodes: int = 1, intra: str | None = None, inter: str | None = None, *, nvls: bool = True
) -> Links:
    """Return the links of a training.

    Args:
        gpu: The GPU, whose file names the link inside a machine.
        gpus: GPUs of each machine.
        nodes: Machines.
        intra: Name or speed of the link inside a machine, if it is not the usual one of this GPU; ``host``: through
            host memory, over this GPU's PCIe.
        inter: The same between machines; assumed by the link inside them where nobody says.
        nvls: Whether NCCL may use NVSwitch's multicast.
    """
    usual = through_host(gpu) if intra == HOST else intra or gpu.link or "pcie3-host"
    between = read_yaml("links.yaml")["between_machines"]
    chosen = inter or between.get(usual, between["other"])
    inside = _link(usual, gpu, "pcie")
    return Links(
        inside if nvls or not inside.multicast else replace(inside, multicast=False, name=f"{inside.name}, no NVLS"),
        _per_gpu(chosen, gpus) if nodes > 1 else None,
        generation_of(gpu),
        gpus,
        assumed=nodes > 1 and inter is None,
    )


def is_through_host(name: str) -> bool:
    """Return whether a link passes through host memory."""
    return name == HOST or bool(read_yaml("links.yaml")["links"].get(name, {}).get("through_host"))


def through_host(gpu: GPU) -> str:
    """Return the name of the link through host memory for a GPU: of the generation of PCIe that is as fast as its."""
    links = read_yaml("links.yaml")["links"]
    own = gpu.links.get("pcie", 0.0)
    names: list[str] = [name for name, entry in links.items() if entry.get("through_host")]
    return min(names, key=lambda name: abs(links[name.removesuffix("-host")]["bytes_per_second"] - own))


def with_points(links: Links, points: Iterable[CollectivePoint]) -> Links:
    """Return the links with collectives that a calibration timed on them, which come before those that ship."""
    found = tuple(Point(one.kind, one.bytes, one.seconds, links, one.ranks, one.nodes) for one in points)
    return replace(links, measured=found) if found else links


def generation_of(gpu: GPU) -> Generation:
    """Return the generation whose figures NCCL uses for a GPU (src/graph/tuning.cc, ``compCapIndex``)."""
    major = gpu.capability[0]
    return "blackwell" if major >= 10 else "hopper" if major == 9 else "ampere" if major == 8 else "volta"


@cache
def points_of(link: str) -> tuple[Point, ...]:
    """Return what was measured over a link, by its id."""
    entry = read_yaml("links.yaml")["links"].get(link, {})
    return tuple(point for group in entry.get("points", ()) for point in _points(link, group))


def _points(link: str, group: Mapping[str, Any]) -> list[Point]:
    ranks, nodes = int(group["ranks"]), int(group.get("nodes", 1))
    gpu = find_gpu(group["gpu"])
    intra, inter = (link, None) if nodes == 1 else (None, link)
    links = links_of(gpu, ranks // nodes, nodes, intra, inter, nvls=group.get("nvls", True))
    found = []
    for unit in ("microseconds", "bus_gb_per_second"):
        for collective, sizes in group.get(unit, {}).items():
            for size, value in sizes.items():
                seconds = value * 1e-6 if unit == "microseconds" else bus_bytes(collective, size, ranks) / (value * 1e9)
                found.append(Point(collective, size, seconds, links, ranks, nodes, group.get("algorithm", "")))
    return found


def bus_bytes(collective: str, size: int, ranks: int) -> float:
    """Return the bytes that bus bandwidth counts (nccl-tests, doc/PERFORMANCE.md)."""
    share = (ranks - 1) / ranks
    whole = dict.fromkeys(("broadcast", "reduce", "send", "recv", "copy"), 1.0)
    return size * (whole | {"all_reduce": 2 * share}).get(collective, share)


@cache
def _link(name: str, gpu: GPU | None = None, kind: LinkKind = "pcie") -> Link:
    """Return a link by its name, or one of a given speed."""
    entry = read_yaml("links.yaml")["links"].get(name)
    if entry is None:
        return Link(
            "", f"{(_speed(name) or 0) / 1e9:.3g} GB/s", kind, _speed(name) or 0.0, source="given by the workload"
        )
    speed = float(entry.get("bytes_per_second", 0.0))
    if "share" in entry:
        sheet = (gpu.links.get("nvlink") if gpu else None) or _usual_nvlink(name)
        speed = entry["share"] * sheet
    return Link(
        name,
        entry["name"],
        entry["kind"],
        speed,
        bool(entry.get("multicast")),
        entry.get("gpus"),
        entry.get("beyond", ""),
        entry.get("latency_us", 0.0) * 1e-6,
        entry.get("like", ""),
        not entry.get("through_host", False),
        " ".join(entry["source"].split()),
    )


def _usual_nvlink(name: str) -> float:
    """Return the NVLink bandwidth of a GPU that usually has this link: for one whose own file names none."""
    return next(gpu.links["nvlink"] for gpu in reversed(gpus()) if gpu.link == name)


@cache
def _per_gpu(name: str, gpus: int) -> Link:
    """Return a link between machines with the bandwidth that each GPU has if all send at once."""
    link = _link(name, None, "network")
    shared = read_yaml("links.yaml")["links"].get(name, {}).get("per") == "machine"
    return replace(link, bytes_per_second=link.bytes_per_second / gpus) if shared else link


def _speed(text: str) -> float | None:
    found = _SPEED.fullmatch(text.strip())
    if found is None:
        return None
    unit = _BITS if found[2] == "Gb/s" else _UNITS[found[2].lower()]
    return float(found[1]) * unit or None
