"""Random numbers of the host: they decide which layers are left out, what is masked, and how samples are ordered."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

OF_FRESH_PROCESS = 67280421310721
"""Seed of PyTorch's generators before anyone sets one (c10/core/GeneratorImpl.h, ``default_rng_seed_val``)."""


def seed_host(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch on the host; those of GPUs decide no size."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def host_states() -> dict[str, Any]:
    """Return the states of the same generators by name, to be compared."""
    numpy: Any = sys.modules.get("numpy")
    with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        drawn = torch.default_generator.get_state().numpy().tobytes()
    states: dict[str, Any] = {"torch": drawn, "random": random.getstate()}
    if numpy is not None:
        _, keys, position, *rest = numpy.random.get_state()
        states["numpy"] = (keys.tobytes(), position, *rest)
    return states
