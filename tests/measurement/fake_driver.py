"""A fake of CUDA below ``torch.cuda``: one GPU, whatever PyTorch was built for and whether there is a driver.

A build for the CPU lacks the C functions that ``torch.cuda`` calls, and those of a build for CUDA raise without a
driver.  Here they answer in both; what is computed stays on the CPU.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

UUID = "0f2a3c1e-0000-1111-2222-333344445555"
PROPERTIES = SimpleNamespace(name="NVIDIA H200", uuid=UUID, major=9, minor=0, total_memory=2**37)


def fake_driver(patch: pytest.MonkeyPatch, statistics: Callable[[int], dict[str, Any]]) -> None:
    """Let ``torch.cuda`` find one GPU.  ``statistics``: what its allocator counted."""
    import_module("torch._dynamo")  # its import takes functions of builds for CUDA, if this seems one
    answers = {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda index: None,
        "_cuda_synchronize": lambda: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_memoryStats": statistics,
        "_cuda_isHistoryEnabled": lambda: False,
        # With an accelerator, optimizers ask for its stream, and loaders pin memory for it.
        "_accelerator_getAccelerator": lambda: None,
    }
    for name, answer in answers.items():
        patch.setattr(torch._C, name, answer, raising=False)
    state = {
        "_initialized": True,
        "_cached_device_count": 1,
        "_is_in_bad_fork": lambda: False,  # of ranks, whose parent looked for a GPU
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "_get_device_properties": lambda index: PROPERTIES,
        "default_generators": (torch.Generator(),),
        "current_stream": lambda device=None: device,  # no stream can be made without a driver
    }
    for name, answer in state.items():
        patch.setattr(torch.cuda, name, answer, raising=False)
