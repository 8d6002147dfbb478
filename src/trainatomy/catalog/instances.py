"""Machines that clouds rent, by their names (``instances.yaml``): GPUs, processor, memory, and a dated list price."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from trainatomy.catalog.files import close_names, read_yaml
from trainatomy.errors import WorkloadError


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine of a cloud.

    Attributes:
        gpu: Id of the GPU (``catalog/gpus``), which also says how the GPUs of the machine are joined.
        gpus: How many the machine has.
        vcpus: Virtual processors.
        processor: What they are, as far as the source says.
        host_memory_bytes: Memory of the host.
        network: Link between machines, a name of ``links.yaml`` or a speed; empty where it is not known.
        usd_per_hour: List price on demand of the whole machine; None: not known.
        price_date: The day that the price was listed.
        price_region: Where.
        price_source: Source of the price.
        source: Source of the other figures.
    """

    id: str
    provider: str
    gpu: str
    gpus: int
    vcpus: int
    processor: str
    host_memory_bytes: int
    network: str
    usd_per_hour: float | None
    price_date: str
    price_region: str
    price_source: str
    source: str


@cache
def instances() -> dict[str, Instance]:
    """Return all machines by name."""
    data = read_yaml("instances.yaml")
    return {name: _instance(name, family, data) for family in data["families"] for name in family["instances"]}


def find_instance(name: str) -> Instance:
    """Return the machine of that name, ignoring case and what separates its words.

    Raises:
        WorkloadError: There is none, or it is known and left out; says why, or suggests the nearest names.
    """
    known = _names().get(_joined(name), "")
    if known in instances():
        return instances()[known]
    near = close_names(name, instances())
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    message = (
        f"unknown instance {name!r}{hint} (`trainatomy gpus --instances` lists all; --gpu and --gpus describe others)"
    )
    if known:
        why = read_yaml("instances.yaml")["left_out"][known]
        message = f"instance {known} {why}; describe its GPU instead (--gpu, gpu: {{base: …}})"
    raise WorkloadError(message, key="instance")


def is_instance(name: str) -> bool:
    """Return whether a machine is called so, be it one that is left out."""
    return _joined(name) in _names()


@cache
def _names() -> dict[str, str]:
    return {_joined(name): name for name in (*instances(), *read_yaml("instances.yaml")["left_out"])}


def _joined(name: str) -> str:
    return "".join(character for character in name.lower().removeprefix("standard_") if character.isalnum())


def _instance(name: str, family: dict[str, Any], data: dict[str, Any]) -> Instance:
    gpus, vcpus, memory_gib, dollars = family["instances"][name]
    own: dict[str, Any] = {key: family.get(key, "") for key in ("provider", "gpu", "processor", "network")}
    own |= {f"price_{key}": str(value) for key, value in data["prices"][family["price"]].items()}
    own |= {"gpus": gpus, "vcpus": vcpus, "host_memory_bytes": memory_gib * 2**30, "usd_per_hour": dollars}
    return Instance(name, source=data["sources"][family["source"]].strip(), **own)
