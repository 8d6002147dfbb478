"""MIG instances: the parts that a card can be divided into (``mig.yaml``), each of which a process sees as a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU

NAME = re.compile(r"(.+?)\s*(?::\s*(?:MIG\s)?|\sMIG\s)\s*(.*)", re.IGNORECASE)
"""A MIG instance of a card: ``h200:3g.71gb``, or as the driver names it, ``NVIDIA H200 MIG 3g.71gb``."""


def mig_profiles(gpu: GPU) -> Mapping[str, Mapping[str, Any]]:
    """Return the MIG instances that a card can be divided into, by profile; none for a card without MIG."""
    tables = read_yaml("mig.yaml")["tables"]
    return next((table["profiles"] for table in tables if gpu.id in table["gpus"]), MappingProxyType({}))


@cache
def instance_of(card: GPU, profile: str) -> GPU:
    """Return a MIG instance: a GPU with a part of a card's memory, bandwidth, multiprocessors and L2 cache.

    Raises:
        WorkloadError: The card has no such profile; the message lists those that it has.
    """
    data = read_yaml("mig.yaml")
    profiles = mig_profiles(card)
    if profile not in profiles:
        divisible = (name for table in data["tables"] for name in table["gpus"])
        known = f"its profiles are {', '.join(profiles)}" if profiles else f"cards with MIG: {', '.join(divisible)}"
        raise WorkloadError(f"no MIG profile {profile!r} of {card.id} is known; {known}", key="gpu")
    one, table = profiles[profile], next(table for table in data["tables"] if card.id in table["gpus"])
    multiprocessors = one.get("multiprocessors", card.multiprocessors)
    share = multiprocessors / card.multiprocessors
    listed = one["memory_mib"] * 2**20 if "memory_mib" in one else None
    assumed = {
        "memory_bytes": None if "measured" in one else data["memory"] if listed else "all of the card's memory",
        "bandwidth_bytes_per_second": data["bandwidth"].strip(),
        "rates": f"the share of the card's multiprocessors, {multiprocessors} of {card.multiprocessors}",
        "contexts": "as of the whole card, what the first tensor adds by the share of its multiprocessors",
        "multiprocessors": one.get("assumed"),
    }
    own = dict.fromkeys(
        ("multiprocessors", "nvidia_smi_bytes", "l2_bytes"), f"{table['source']}; {data['guide'].strip()}"
    )
    cards = {name: text for name, text in card.sources.items() if name.partition(".")[0] not in {*assumed, *own}}
    contexts = {
        era: replace(each, first_tensor_bytes=round(each.first_tensor_bytes * share))
        for era, each in card.contexts.items()
    }
    return replace(
        card,
        id=f"{card.id}:{profile}",
        name=f"{card.name}, MIG {profile}",
        device_name=f"{card.device_name} MIG {profile}",
        slice_of=card.id,
        multiprocessors=multiprocessors,
        memory_bytes=one.get("memory_bytes", min(listed or card.memory_bytes, card.memory_bytes)),
        nvidia_smi_bytes=listed or card.nvidia_smi_bytes,
        driver_reserved_bytes=None,
        bandwidth_bytes_per_second=card.bandwidth_bytes_per_second * one["memory"] / table["slices"],
        rates=MappingProxyType({name: rate * share for name, rate in card.rates.items()}),
        l2_bytes=card.l2_bytes * one["l2"] // table["slices"] if card.l2_bytes else None,
        power_limit_watts=None,
        links=MappingProxyType({name: speed for name, speed in card.links.items() if name != "nvlink"}),
        link="",
        contexts=MappingProxyType(contexts),
        aliases=(),
        sources=MappingProxyType(cards | own | ({"memory_bytes": one["measured"]} if "measured" in one else {})),
        assumed=MappingProxyType({name: text for name, text in assumed.items() if text}),
    )
