"""Power of GPUs at their full clocks, as measured by architecture (``power.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.catalog.files import read_yaml

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU


class PowerRates(NamedTuple):
    """Power that a GPU's work takes at full clocks, and its limit; the meaning of each is in ``power.yaml``."""

    limit_watts: float
    idle_watts: float
    joules_per_flop: Mapping[str, float]
    attention: float
    joules_per_byte: float
    kernel_watts: float
    exponent: float


@lru_cache(maxsize=64)
def power_of(gpu: GPU) -> PowerRates | None:
    """Return the power rates of a GPU; None if its limit is not known or no GPU of its architecture was measured."""
    if gpu.power_limit_watts is None:
        return None
    found: Mapping[str, Any]
    for found in read_yaml("power.yaml").values():
        if tuple(found["capability"]) == gpu.capability:
            return PowerRates(
                gpu.power_limit_watts,
                float(found["idle_watts"]),
                {rate: float(joules) for rate, joules in found["joules_per_flop"].items()},
                float(found["attention"]),
                float(found["joules_per_byte_of"].get(gpu.device_name, found["joules_per_byte"])),
                float(found["kernel_watts"]),
                float(found["exponent"]),
            )
    return None
