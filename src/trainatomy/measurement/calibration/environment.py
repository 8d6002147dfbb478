"""Where a calibration was taken: card, driver, versions, processor."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainatomy.libraries import installed_versions


def environment() -> dict[str, Any]:
    """Where the measurement was taken."""
    import torch

    from trainatomy.measurement.step.here import driver_version

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": driver_version(),
        "versions": installed_versions(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "processor": _processor(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    """The CPU's model, as Linux names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
