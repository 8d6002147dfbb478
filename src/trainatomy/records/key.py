"""A hash of what was asked for, by which an interrupted comparison knows what it has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def key_of(workload: Mapping[str, object], *, steps: int | None = None, components: bool = True) -> str:
    """SHA-256 (hex) of the canonical JSON of what a run is asked to do.

    ``workload``: the mapping of a workload file, whose ``name`` does not count; ``steps``: optimizer steps asked for
    beside the workload (``None``: as it says); ``components``: whether memory was to be attributed to components.
    What came of it (status, steps run, versions) is no part of the key.
    """
    asked = {key: value for key, value in workload.items() if key != "name"}
    canonical = json.dumps([asked, steps, components], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()
