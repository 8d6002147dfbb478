"""``torch.cuda`` without CUDA: the questions that libraries ask before they use a GPU, answered for the card that is
simulated.

Everything is put back when the context ends.  Patched on a machine with a GPU as well, so that a prediction never
touches it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.cuda.amp import common as amp_common
from torch.utils import _foreach_utils, checkpoint

from trainatomy.operators.allocation.plan import Processor

CUDA = torch.device("cuda:0")
#: Functions of ``torch.cuda`` that do nothing.
_SILENT = (
    "set_device synchronize init _lazy_init _lazy_call ipc_collect manual_seed manual_seed_all seed seed_all "
    "set_rng_state set_rng_state_all reset_peak_memory_stats reset_max_memory_allocated set_stream "
    "reset_accumulated_memory_stats set_per_process_memory_fraction"
).split()
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


#: Resident threads of a multiprocessor, where they are not 2048. Source: CUDA C++ programming guide, table of compute
#: capabilities.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


class Properties:
    """What ``torch.cuda.get_device_properties`` gives."""

    def __init__(self, name: str, total_memory: int, processor: Processor) -> None:
        self.name = name
        self.total_memory = total_memory
        self.major, self.minor = processor.capability
        self.multi_processor_count = processor.multiprocessors
        self.warp_size = 32
        self.max_threads_per_multi_processor = _THREADS.get(processor.capability, 2048)
        self.is_integrated = self.is_multi_gpu_board = False
        self.gcnArchName = ""


class Stream:
    """A stream that runs nothing; there is one queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CUDA
        self.stream_id = self.cuda_stream = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: True if name == "query" else self if name == "record_event" else None


class _Event(Stream):
    def elapsed_time(self, other: object) -> float:
        return 0.0


def _always(value: Any) -> Callable[..., Any]:
    """A new function each time: libraries keep tables by function."""
    return lambda *args, **kwargs: value


def _cuda(properties: Properties, empty_cache: Callable[[], None]) -> dict[str, Any]:
    capability = (properties.major, properties.minor)
    state = torch.zeros(16, dtype=torch.uint8)
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        "is_available": _always(True),
        "is_initialized": _always(True),
        "_is_in_bad_fork": _always(False),
        "_initialized": True,
        "device_count": _always(1),
        "current_device": _always(0),
        "get_device_name": _always(properties.name),
        "get_device_capability": _always(capability),
        "get_device_properties": _always(properties),
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0) or including_emulation,
        "mem_get_info": _always((properties.total_memory, properties.total_memory)),
        "get_arch_list": _always([f"sm_{properties.major}{properties.minor}"]),
        "current_stream": _always(Stream()),
        "default_stream": _always(Stream()),
        "Stream": Stream,
        "Event": _Event,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "device_of": contextlib.nullcontext,
        "empty_cache": empty_cache,
        "get_rng_state": _always(state),
        "get_rng_state_all": _always([state]),
        "initial_seed": _always(0),
        "memory_stats": _always({}),
        "is_current_stream_capturing": _always(False),
        **{name: _always(0) for name in memory},
        **{name: _always(None) for name in _SILENT},
    }


def _accelerator() -> dict[str, Any]:
    return {
        "is_available": _always(True),
        "current_accelerator": _always(torch.device("cuda")),
        "device_count": _always(1),
        "current_device_index": _always(0),
        "current_device_idx": _always(0),
        "set_device_index": _always(None),
        "synchronize": _always(None),
        "current_stream": _always(Stream()),
    }


def _metadata(tensor: torch.Tensor) -> dict[str, Any]:
    """What checkpointing compares. It asks once from inside an operation and once outside, and must hear the same
    device."""
    with torch._C.DisableTorchFunction():
        return {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}


def _told(text_of: Callable[..., str]) -> Callable[..., str]:
    """A tensor without data as text: where it is, not what it holds."""

    def text(tensor: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        with torch._C.DisableTorchFunction():
            return text_of(tensor, tensor_contents=tensor_contents).replace("device='meta'", "device='cuda:0'")

    return text


def _overridable_checks() -> Iterator[tuple[Any, str]]:
    """Functions written in Python ask whether a mode overrides them, and run with the mode off if so; they must not,
    see ``mode``."""
    for module in [m for n, m in sys.modules.items() if n == "torch" or n.startswith("torch.")]:
        if module.__name__ in ("torch.overrides", "torch._C"):
            continue
        names = vars(module)
        for check in _CHECKS:
            if check in names:
                yield module, check


@contextlib.contextmanager
def simulated_driver(
    properties: Properties, empty_cache: Callable[[], None], clear_autocast_cache: Callable[[], None]
) -> Iterator[None]:
    """While open, Python is told that one GPU is there."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        clear_autocast_cache()

    with contextlib.ExitStack() as stack:
        for name, value in _cuda(properties, empty_cache).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value, create=True))
        for name, value in _accelerator().items():
            if hasattr(torch.accelerator, name):
                stack.enter_context(mock.patch.object(torch.accelerator, name, value))
        stack.enter_context(mock.patch.object(torch._C, "_get_accelerator", _always(torch.device("cuda")), create=True))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _always(0), create=True))
        devices = _foreach_utils._get_foreach_kernels_supported_devices()
        foreach = _always([*devices, "meta"])
        stack.enter_context(mock.patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", foreach))
        stack.enter_context(mock.patch.object(amp_common, "amp_definitely_not_available", _always(False)))
        stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", clear_both))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
        stack.enter_context(mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=_metadata))
        stack.enter_context(mock.patch.object(torch._tensor_str, "_str", _told(torch._tensor_str._str)))
        for module, check in list(_overridable_checks()):
            stack.enter_context(mock.patch.object(module, check, _always(False)))
        yield
