"""``torch.cuda`` without CUDA: answers to what libraries ask before they use a GPU, for the GPU that is simulated.

The patches apply on a machine with a GPU as well, so that a prediction never touches it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.cuda.amp import common as amp_common
from torch.nn.parallel import _functions as parallel_functions
from torch.utils import _foreach_utils, checkpoint

from trainatomy.alike import alike
from trainatomy.errors import SimulationError
from trainatomy.simulator.device import DeviceProperties, SimulatedGenerator
from trainatomy.simulator.parallel.group import Topology
from trainatomy.simulator.streams import StreamContext, Streams

if TYPE_CHECKING:
    pass


_NO_OPS = (
    "init _lazy_init _lazy_call ipc_collect manual_seed manual_seed_all seed seed_all "
    "set_rng_state set_rng_state_all reset_accumulated_memory_stats set_per_process_memory_fraction"
).split()
"""Functions of ``torch.cuda`` that do nothing in a simulation."""
_NCCL = (2, 30, 7)
"""The version whose collectives are predicted (``links.yaml``)."""
_HIP = "7.2.26015"
"""What PyTorch's builds for AMD GPUs say of theirs: 2.13 and 2.14 are built with ROCm 7.2."""
_MEMORY_HISTORY = ("_record_memory_history", "_dump_snapshot", "_save_memory_usage", "_save_segment_usage")
"""Functions of ``torch.cuda.memory`` that record allocations or write what was recorded: nothing, here."""
_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

_PRIVATE_POOLS = {"CUDAGraph": "what is allocated while a graph is captured", "MemPool": "what is allocated in it"}
"""Classes that are refused, and what they keep."""


class CurrentDevice:
    """Device of the simulated process, with the checks of ``torch.cuda`` on device arguments."""

    def __init__(self, topology: Topology) -> None:
        self.count = topology.gpus_per_node
        self.first = self.index = topology.local_rank
        self.devices = {
            index: torch.device("cuda", index) for index in range(self.first, self.first + topology.devices)
        }

    @property
    def device(self) -> torch.device:
        """The current device."""
        return self.devices[self.index]

    def check(self, device: Any) -> int:
        """Return the index that ``device`` (None, an index, a string or a ``torch.device``) names.

        Raises:
            SimulationError: It is not a GPU that this process simulates.
        """
        index = self._index(device)
        if index is None or index < 0:
            return self.index
        if index in self.devices:
            return index
        if index >= self.count:
            raise SimulationError(
                f"cuda:{index} does not exist: the simulated machine has {self.count} "
                f"GPU{'s' if self.count > 1 else ''} (cuda:0{f' to cuda:{self.count - 1}' if self.count > 1 else ''})"
            )
        raise SimulationError(
            f"cuda:{index} is not simulated: each process simulates one GPU, and this one is cuda:{self.index}.\n"
            "Of models that one process spreads over several GPUs, DataParallel is predicted (parallel.strategy: dp)"
        )

    def exchange(self, device: Any) -> int:
        """Make ``device`` the current one and return the index of the one before."""
        before, self.index = self.index, self.check(device)
        return before

    @staticmethod
    def _index(device: Any) -> int | None:
        if device is None or isinstance(device, int):
            return device
        if isinstance(device, str):
            device = torch.device(device)
        index: int | None = device.index if isinstance(device, torch.device) and device.type == "cuda" else None
        return index


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the simulation that ``torch.cuda`` calls.

    Attributes:
        empty_cache: Called by ``torch.cuda.empty_cache``.
        clear_autocast_cache: Called when the outermost autocast context ends.
        record_stream: Called with (tensor, stream) by ``Tensor.record_stream``.
        to_device: Moves a tensor to the simulated GPU.
        counters: The allocator's counters, by the names of ``torch.cuda``.
    """

    empty_cache: Callable[[], None]
    clear_autocast_cache: Callable[[], None]
    record_stream: Callable[[torch.Tensor, Any], None]
    to_device: Callable[[torch.Tensor], torch.Tensor]
    counters: Mapping[str, Callable[..., Any]]


class DeviceContext:
    """``torch.cuda.device``, ``device_of`` and ``_DeviceGuard``: make a device of the process the current one."""

    def __init__(self, current: CurrentDevice, device: Any) -> None:
        self.idx = current.check(getattr(device, "device", device))
        self.prev_idx = current.index
        self._current = current

    def __enter__(self) -> None:
        self.prev_idx, self._current.index = self._current.index, self.idx

    def __exit__(self, *error: object) -> None:
        self._current.index = self.prev_idx


def _device_class(current: CurrentDevice) -> type[DeviceContext]:
    """Return ``torch.cuda.device``, a class: PyTorch asks whether something is an instance of it."""

    class Device(DeviceContext):
        def __init__(self, device: Any) -> None:
            super().__init__(current, device)

    return Device


class _SilentNvtx:
    """``torch.cuda.nvtx`` without a profiler: ranges and marks do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0


def _always(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value``; a new one each time, as libraries keep tables by function."""
    return lambda *args, **kwargs: value


def _cuda(properties: DeviceProperties, current: CurrentDevice, streams: Streams, hooks: Hooks) -> dict[str, Any]:
    """Return the replacements for attributes of ``torch.cuda``."""
    state = torch.zeros(16, dtype=torch.uint8)

    def set_device(device: Any) -> None:
        current.exchange(device)

    def get_device_properties(device: Any = None) -> DeviceProperties:
        if not 0 <= (CurrentDevice._index(device) or 0) < current.count:
            current.check(device)
        return properties  # all GPUs of a machine are alike

    return {
        "is_available": _always(True),
        "is_initialized": _always(True),
        "_is_in_bad_fork": _always(False),
        "_initialized": True,
        "device_count": _always(current.count),
        "current_device": lambda: current.index,
        "set_device": set_device,
        "_exchange_device": current.exchange,
        "_maybe_exchange_device": current.exchange,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": get_device_properties,
        "can_device_access_peer": _always(True),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or properties.computes_in_bfloat16,
        "get_arch_list": lambda: [
            properties.gcnArchName.partition(":")[0] or f"sm_{properties.major}{properties.minor}"
        ],
        "device": _device_class(current),
        "device_of": lambda obj: DeviceContext(current, obj),
        "_DeviceGuard": lambda index: DeviceContext(current, index),
        "empty_cache": hooks.empty_cache,
        "get_rng_state": _always(state),
        "get_rng_state_all": _always([state]),
        "initial_seed": _always(0),
        **_cuda_streams(streams),
        **{name: _always(None) for name in _NO_OPS},
    }


def _cuda_streams(streams: Streams) -> dict[str, Any]:
    """Return the replacements for streams and events in ``torch.cuda``."""
    return {
        "Stream": streams.stream_class,
        "Event": streams.event_class,
        "ExternalStream": streams.external_class,
        "current_stream": lambda device=None: streams.executing,
        "default_stream": lambda device=None: streams.default,
        "set_stream": streams.select,
        "stream": lambda stream: StreamContext(streams, stream),
        "synchronize": lambda device=None: streams.synchronize_device(),
        "is_current_stream_capturing": _always(False),
    }


def _accelerator(current: CurrentDevice, streams: Streams) -> dict[str, Any]:
    """Return the replacements for attributes of ``torch.accelerator``."""
    return {
        "is_available": _always(True),
        "current_accelerator": _always(torch.device("cuda")),
        "device_count": _always(current.count),
        "current_device_index": lambda: current.index,
        "current_device_idx": lambda: current.index,
        "set_device_index": current.exchange,
        "set_device_idx": current.exchange,
        "device_index": lambda index: DeviceContext(current, index),
        "synchronize": lambda device=None: streams.synchronize_device(),
        "current_stream": lambda device=None: streams.executing,
        "set_stream": streams.select,
    }


def _scatter(current: CurrentDevice, hooks: Hooks) -> Callable[..., list[torch.Tensor]]:
    """Return ``torch._C._scatter``, with which ``DataParallel`` distributes a batch."""

    def scatter(
        tensor: torch.Tensor,
        devices: list[int],
        chunk_sizes: list[int] | None = None,
        dim: int = 0,
        streams: Any = None,
    ) -> list[torch.Tensor]:
        for device in devices:
            current.check(device)
        chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
        return [hooks.to_device(chunk) for chunk in chunks]

    return scatter


def _tensor_metadata(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the metadata that gradient checkpointing compares.

    It asks once from inside an operation and once outside, and must hear the same device.
    """
    with torch._C.DisableTorchFunction():
        return {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}


def _as_text(format_tensor: Callable[..., str], device: torch.device) -> Callable[..., str]:
    """Return ``str`` of a tensor: its device, not its data."""

    def text(tensor: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        with torch._C.DisableTorchFunction():
            return format_tensor(tensor, tensor_contents=tensor_contents).replace("device='meta'", f"device='{device}'")

    return text


def _override_checks() -> Iterator[tuple[Any, str]]:
    """Yield the places of PyTorch's Python code that ask whether a mode overrides a function.

    A function that is overridden runs with the mode off; ``functions`` needs to see the builtins inside.
    """
    for module in [m for n, m in sys.modules.items() if n == "torch" or n.startswith("torch.")]:
        if module.__name__ in ("torch.overrides", "torch._C"):
            continue
        names = vars(module)
        for check in _OVERRIDE_CHECKS:
            if check in names:
                yield module, check


def _refused(name: str, pool: str) -> type:
    """Return a class in place of one whose memory comes from a private pool: it cannot be made."""

    def make(cls: type, *arguments: Any, **keywords: Any) -> Any:
        raise SimulationError(
            f"torch.cuda.{name} keeps {pool} in a memory pool of its own, which is not simulated.\n"
            "Leave it out: many scripts have an option for it. Or measure the script on a GPU: trainatomy run --measure"
        )

    return type(name, (), {"__new__": make, "__module__": "torch.cuda"})


def install_driver(
    stack: contextlib.ExitStack, properties: DeviceProperties, current: CurrentDevice, streams: Streams, hooks: Hooks
) -> None:
    """Patch PyTorch so that Python code finds the simulated GPU; ``stack`` undoes it."""
    clear = torch.clear_autocast_cache

    def clear_both_caches() -> None:
        clear()
        hooks.clear_autocast_cache()

    def patch(target: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(target, name, value, create=True))

    def replace(module: Any, name: str, value: Any) -> None:
        """Replace a function that users call, and keep its signature."""
        patch(module, name, value if inspect.isclass(value) else alike(getattr(module, name, None), value))

    for name, value in _cuda(properties, current, streams, hooks).items():
        replace(torch.cuda, name, value)
    for name, value in _accelerator(current, streams).items():
        if hasattr(torch.accelerator, name):
            replace(torch.accelerator, name, value)
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
        for name, value in hooks.counters.items():
            if hasattr(module, name):
                replace(module, name, value)
        replace(module, "empty_cache", hooks.empty_cache)
    for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory):
        for name, pool in _PRIVATE_POOLS.items():
            if hasattr(module, name):
                patch(module, name, _refused(name, pool))
    for name in _MEMORY_HISTORY:
        patch(torch.cuda.memory, name, _always(None))
    patch(torch.cuda.memory, "_snapshot", _always({"segments": [], "device_traces": [[]]}))
    patch(torch.cuda.nvtx, "_nvtx", _SilentNvtx())
    patch(torch._C, "_get_accelerator", _always(torch.device("cuda")))
    patch(torch._C, "_cuda_getCurrentRawStream", lambda device=0: streams.executing.stream_id)
    patch(torch._C, "_scatter", _scatter(current, hooks))
    # C++ parses the stream before it asks a mode, and accepts none of ours.
    patch(torch.Tensor, "record_stream", lambda tensor, stream: hooks.record_stream(tensor, stream))
    patch(torch, "Stream", streams.stream_class)
    patch(torch, "Generator", SimulatedGenerator)
    patch(torch, "Event", streams.event_class)
    patch(parallel_functions, "_streams", None)  # a cache of streams
    devices = _foreach_utils._get_foreach_kernels_supported_devices()
    patch(_foreach_utils, "_get_foreach_kernels_supported_devices", _always([*devices, "meta"]))
    patch(amp_common, "amp_definitely_not_available", _always(False))
    patch(torch, "clear_autocast_cache", clear_both_caches)
    on_amd = bool(properties.gcnArchName)
    patch(torch.version, "hip", _HIP if on_amd else None)
    patch(torch.version, "cuda", None if on_amd else torch.version.cuda or "13.0")
    if not hasattr(torch._C, "_nccl_version"):  # a build for the CPU; libraries ask before they train in bf16
        patch(torch.cuda.nccl, "version", _always(_NCCL))
        if torch.distributed.is_available():
            patch(torch.distributed, "is_nccl_available", _always(True))
    patch(torch._tensor_str, "_str", _as_text(torch._tensor_str._str, current.device))
    stack.enter_context(mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=_tensor_metadata))
    for module, check in list(_override_checks()):
        patch(module, check, _always(False))
