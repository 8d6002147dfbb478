"""DeepSpeed's offloading to NVMe drives without a drive: files that have sizes, and buffers in locked memory.

The swappers are DeepSpeed's own: which buffers they make (``buffer_count``, ``buffer_size``), when they read and write.
Replaced are the handle in C++ that does it, and folders, which are not made.  Every transfer takes the CPU's time until
it waits for it; that the drive works beside the CPU and the GPU is not counted.
Source: DeepSpeed 0.16-0.19, runtime/swap_tensor/ and csrc/aio/py_lib.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import torch

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from trainatomy.simulator.process import SimulatedProcess

_MODULES = ("swap_tensor.partitioned_param_swapper", "swap_tensor.optimizer_utils", "zero.stage3")
"""Modules below ``deepspeed.runtime`` that make folders, or remove them."""


class Drive:
    """The drive of a process: an extension of DeepSpeed's (``AsyncIOBuilder``).

    Attributes:
        files: Sizes of the files by their paths.
    """

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self.files: dict[str, int] = {}

    def aio_handle(self, *_: Any, **__: Any) -> Handle:
        """Return a handle; how it divides transfers changes nothing here."""
        return Handle(self)

    def pin_handle(self) -> NoReturn:
        """Refuse to pin all memory by DeepSpeed's own allocator."""
        raise SimulationError("DS_PIN_MEMORY_BACKEND=native is not simulated: PyTorch's pinned memory is")

    @contextlib.contextmanager
    def without_folders(self) -> Iterator[None]:
        """Let DeepSpeed make and remove no folders on this machine; afterwards, count what lies on the drive."""
        paths = SimpleNamespace(path=os.path, makedirs=lambda *_, **__: None)
        trees = SimpleNamespace(rmtree=lambda *_, **__: None)
        with contextlib.ExitStack() as stack:
            for name in _MODULES:
                module = import_module(f"deepspeed.runtime.{name}")
                for attribute, stand_in in (("os", paths), ("shutil", trees)):
                    if hasattr(module, attribute):
                        stack.enter_context(mock.patch.object(module, attribute, stand_in))
            yield
        if self.files:
            size = sum(self.files.values())
            self.process.storages.host_memory.on_drive = size
            self.process.notes.append(
                f"{human_bytes(size)} of each process lie on the NVMe drive; it is assumed to move 3 GB/s for each "
                "process while nothing else goes on, so that the step is rather too long"
            )


class Handle:
    """A handle for transfers between buffers and files, which are done when they are waited for."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._pending: list[int] = []
        self._locked: set[int] = set()

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer in locked memory, which is none of PyTorch's pinned blocks (deepspeed_pin_tensor.cpp)."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            made = torch.empty(int(numel), dtype=like.dtype, device="meta")
        self._drive.process.placement.keep_on_host(made)
        self._locked.add(made.untyped_storage()._cdata)
        return made

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free a buffer, whose storage dies by itself."""
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in locked or pinned memory."""
        with torch._C.DisableTorchFunction():
            is_locked = tensor.untyped_storage()._cdata in self._locked
            return is_locked or (tensor.is_meta and self._drive.process.storages.is_pinned(tensor))

    def async_pread(self, buffer: torch.Tensor, path: Any, offset: int = 0) -> int:
        """Begin to read a file."""
        self._pending.append(int(buffer.nbytes))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: Any, offset: int = 0) -> int:
        """Begin to write a file."""
        files, end = self._drive.files, offset + int(buffer.nbytes)
        files[str(path)] = max(files.get(str(path), 0), end)
        self._pending.append(int(buffer.nbytes))
        return 0

    def wait(self) -> int:
        """End all transfers; return how many there were."""
        moved, count = sum(self._pending), len(self._pending)
        self._pending.clear()
        if moved:
            with one_operation("deepspeed::aio", bytes=moved):
                pass
        return count

    def __getattr__(self, name: str) -> NoReturn:
        raise SimulationError(f"DeepSpeed's aio_handle.{name} is not simulated")
