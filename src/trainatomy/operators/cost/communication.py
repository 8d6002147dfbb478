"""Collectives, whose cost is that of the links between the GPUs (``nccl.py``)."""

from __future__ import annotations

from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, name_of, number
from trainatomy.operators.cost.nccl import collective_seconds
from trainatomy.results.operations import Call


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
