"""A GPU as cuDNN describes it: the JSON text that stands for a device in its deviceless API.

Properties of cards that were read on the card itself are in ``cudnn.yaml``. Those of others follow from the
catalog's figures and from what CUDA documents for their compute capability.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import GPU

_KILOHERTZ = 1000
_FLOP_PER_LANE = 2
_RECORDED = ((9, 12), (9, 21))
"""The first version of cuDNN whose engines the records name, and the first that has others.

2,475 of the convolutions of the shipped calibrations get the same plans from 9.12, 9.15, 9.19 and 9.20; 10 % get others
from 9.10, and 31 % from 9.21, 9.22 and 9.23.  PyPI's CUDA builds of PyTorch 2.11 to 2.13 bring 9.19 or 9.20, those of
2.14 and 2.15 9.24 and 9.26: of 261 random convolutions that an H200 ran with 9.19, 92 % match with 9.20, 46 % with
these.
"""


def has_recorded_engines(version: str) -> bool:
    """Return whether a version of cuDNN, such as 9.19.0, has the engines that an H200's answers and timings name.

    They are in ``cudnn_plans.json`` and in the points of the calibrations.
    """
    first, end = _RECORDED
    return first <= tuple(map(int, version.split(".")[:2])) < end


def device_text(gpu: GPU) -> str | None:
    """Return the description of a GPU, None for those that cuDNN 9.8 and newer do not run on."""
    catalog = read_yaml("cudnn.yaml")
    limits = catalog["capabilities"].get(".".join(map(str, gpu.capability)))
    if limits is None:
        return None
    measured: dict[str, Any] = catalog["devices"].get(gpu.device_name, {}).get("properties", {})
    return json.dumps({**_assumed(gpu, limits), **measured, **_given(gpu)})


def level_factors(gpu: GPU) -> Mapping[str, float]:
    """Return how much longer than on an H200 a level of partial sums takes (``operators/allocation/cudnn/divided.py``).

    "all": where all tiles are shared; the name of a type: where only the last ones are. Empty: as long.
    """
    found: Mapping[str, float] = read_yaml("cudnn.yaml")["devices"].get(gpu.device_name, {}).get("level_factors", {})
    return found


def is_measured(gpu: GPU) -> bool:
    """Return whether the properties were read on a card of this kind."""
    return gpu.device_name in read_yaml("cudnn.yaml")["devices"]


def _given(gpu: GPU) -> dict[str, Any]:
    """Return the properties that the catalog, or the user's changes of it, hold."""
    major, minor = gpu.capability
    return {
        "multiProcessorCount": gpu.multiprocessors,
        "totalGlobalMem": gpu.memory_bytes,
        "deviceVer": 100 * major + 10 * minor,
        "deviceName": gpu.device_name,
        **({"l2CacheSize": gpu.l2_bytes} if gpu.l2_bytes else {}),
    }


def _assumed(gpu: GPU, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the properties that follow from the compute capability, and clocks from rate and bandwidth."""
    lanes = gpu.multiprocessors * limits["fp32_lanes"] * _FLOP_PER_LANE
    clock = gpu.rates.get("fp32", 0.0) / lanes / _KILOHERTZ
    return {**limits["properties"], "l2CacheSize": 0, "smClockRateKHz": round(clock)}
