"""Where a calibration was taken: card, driver, versions, processor."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from trainatomy.errors import DeviceError


def environment() -> dict[str, Any]:
    """Where the measurement was taken."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        "versions": {name: metadata.version(name) for name in ("torch", "trainatomy") if _installed(name)},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "processor": _processor(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _driver() -> str | None:
    from trainatomy.errors import MissingLibrary
    from trainatomy.gpu.card import nvml

    try:
        with nvml.session() as driver:
            return driver.version
    except (MissingLibrary, DeviceError):
        return None


def _processor() -> str:
    """The CPU's model, as Linux names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
