"""One process that works on several GPUs (``torch.nn.DataParallel``): where its tensors are, and what one GPU does.

All GPUs' work is executed, in one thread; the trace and the operations are those of one GPU.  What other GPUs do takes
no time of their own: they have the same chunk of the batch, or a smaller last one, and are taken to keep pace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainatomy.operators.allocation.workspaces import Workspace
from trainatomy.results.plan import GroupUse
from trainatomy.simulator.driver import CurrentDevice, DeviceContext
from trainatomy.simulator.parallel.collectives import tensors_in
from trainatomy.simulator.placement import Placement
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.topology import Topology

_DISABLED = torch._C.DisableTorchFunction


class ReplicaRecorder(Recorder):
    """Recorder of one GPU of a process with several; see ``Recorder``.

    An operation runs on the GPU that holds the first of its tensors that is on one; without such a tensor, on the
    current GPU.  Allocations and operations of other GPUs than the recorded one are not written.

    Attributes:
        topology: Place of the process, with its GPUs.
        shown: Index of the GPU that is recorded.
        groups: What the GPUs were used for together.
    """

    communicates = True

    def __init__(self, *args: Any, topology: Topology, current: CurrentDevice, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.topology = topology
        self.shown = topology.device
        self.trace.rank = topology.device
        self.groups: dict[tuple[int, ...], set[GroupUse]] = {}
        self._current = current
        self._running: int | None = None
        self._placed: int | None = None
        self.operations.threads = topology.devices

    @property
    def gpu(self) -> int:
        """Index of the GPU of the running operation, outside of operations of the current one."""
        return self._current.index if self._running is None else self._running

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _DISABLED():
            gpu = self._gpu_of_operation(args)
            before, self._running = self._running, gpu
            writer = self.operations
            recording, writer.recording = writer.recording, writer.recording and gpu == self.shown
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
                if gpu != self._current.first:
                    self._put_on(gpu, result)
                return result
            finally:
                writer.recording = recording
                self._running = before

    def _gpu_of_operation(self, args: tuple[Any, ...]) -> int:
        if self._placed is not None:
            return self._placed
        for tensor in tensors_in(args):
            if tensor.is_meta and tensor.layout == torch.strided and self._storages.on_device(tensor):
                found = self._storages.gpu_of(tensor)
                return self._current.first if found is None else found
        return self._current.index

    def _put_on(self, gpu: int, result: Any) -> None:
        for tensor in tensors_in(result):
            if tensor.is_meta and tensor.layout == torch.strided and self._storages.on_device(tensor):
                self._storages.put_on(tensor, gpu)

    def hold(self, tensor: torch.Tensor, operation: str, size: int | None = None) -> int | None:
        """Write the allocation of a tensor that came to life on the recorded GPU, and remember which GPU it is on."""
        if self.gpu != self._current.first:
            self._storages.put_on(tensor, self.gpu)
        return super().hold(tensor, operation, size)

    def allocate(self, size: int, operation: str) -> int:
        """Write a request of ``size`` bytes, if it is the recorded GPU's; returns -1 for another one's."""
        return super().allocate(size, operation) if self.gpu == self.shown else -1

    def _use_libraries(self, name: str) -> list[Workspace]:
        return super()._use_libraries(name) if self.gpu == self.shown else []

    @contextlib.contextmanager
    def placing(self, gpu: int) -> Iterator[None]:
        """Run the block's operations on one GPU, wherever their tensors are, and leave them out of the operations."""
        before, self._placed = self._placed, gpu
        recording, self.operations.recording = self.operations.recording, False
        try:
            yield
        finally:
            self._placed, self.operations.recording = before, recording

    # -- threads and transfers -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def thread(self, gpu: int) -> Iterator[None]:
        """Run the block as a thread of ``parallel_apply`` for a GPU; modules of other GPUs are not counted."""
        writer = self.operations
        before = writer.in_thread, writer.recording
        writer.in_thread = True
        writer.recording = writer.recording and gpu == self.shown
        try:
            yield
        finally:
            writer.in_thread, writer.recording = before

    def label_all(self, tensors: Sequence[torch.Tensor], label: str) -> None:
        """Label the allocations behind tensors on the recorded GPU, unless they have labels."""
        for tensor in tensors:
            self.label(tensor, label)

    def buffer(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that tensors are flattened copies for a transfer, where nothing else labels them."""
        for tensor in tensors:
            number = self.number_of(tensor)
            if number is not None and number >= 0:
                self.label_at_end(number, "communication_buffer")

    def replicated(self, modules: int) -> None:
        """Write the work of the CPU that copied this many modules; their weights are copied by collectives."""
        self._write_transfer("python::replicate", (), {"modules": modules})

    def collective(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        """Write a collective of NCCL between the GPUs that hold ``tensors``, on the current stream of each."""
        with _DISABLED():
            gpus = tuple(sorted(self._gpu_of_operation((tensor,)) for tensor in tensors))
            self.groups.setdefault(gpus, set()).add(GroupUse(kind))
            size = tensors[0].numel() * tensors[0].itemsize
        self._write_transfer(f"nccl::{kind}", tensors, {"bytes": size, "ranks": len(gpus), "nodes": 1})

    def peer_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Write a copy from one GPU's memory to another's, which occupies the streams of both."""
        with _DISABLED():
            gpus = {self._gpu_of_operation((tensor,)) for tensor in (source, target)}
            size = source.numel() * source.itemsize
        if self.shown in gpus:
            self._write_transfer("peer::copy", (source, target), {"bytes": size})

    def _write_transfer(self, name: str, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any]) -> None:
        self.operations.write_one(name, tensors[:1], tensors[1:], dict(numbers), (), len(self.trace.events))


class ReplicaPlacement(Placement):
    """Placement in a process with several GPUs; see ``Placement``."""

    def __init__(self, *parts: Any, recorder: ReplicaRecorder) -> None:
        """Take the parts of a placement, and the recorder that copies are written to."""
        super().__init__(*parts)
        self.recorder = recorder

    def on(self, device: Any) -> AbstractContextManager[object]:
        """Return a context in which the GPU that ``device`` names is the current one."""
        return DeviceContext(self._current, device)

    def gpu_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the GPU that holds a tensor."""
        found = self._storages.gpu_of(tensor)
        return self.gpu if found is None else self._current.devices[found]

    def move(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Copy a tensor between host and GPU or between GPUs, as ``Tensor.to`` does."""
        if device.type != "cuda":
            return super().move(tensor, device, dtype, non_blocking, copy, **options)
        if not self.is_device(tensor) or self.gpu_of(tensor) == device:
            with self.on(device):
                return super().move(tensor, device, dtype, non_blocking, copy, **options)
        return self.between(tensor, device, dtype or tensor.dtype)

    def between(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Copy a tensor to another GPU; one that changes its dtype does so where it is."""
        source = tensor.to(dtype)
        with self.recorder.placing(device.index):
            copied: torch.Tensor = torch.ops.aten._to_copy(source)
        self.recorder.peer_copy(source, copied)
        return copied
