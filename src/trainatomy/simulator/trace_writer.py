"""Writes the allocation trace of a simulated process, and knows which allocation holds each tensor."""

from __future__ import annotations

from typing import Any

import torch

from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin, PinnedBlock, StreamUse
from trainatomy.simulator.cpu_waits import CPUWaits
from trainatomy.simulator.inplace import GradientReferences
from trainatomy.simulator.ledger import Ledger
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.operations import OperationWriter
from trainatomy.simulator.storages import Storages, storage_key
from trainatomy.simulator.streams import Streams, SyncKind

_DISABLED = torch._C.DisableTorchFunction


class TraceWriter:
    """Writer of the trace and of the operations of one process.

    Attributes:
        trace: Allocations so far.
        ledger: Which of them each storage lies in.
        operations: Writer of the operations of one step.
        streams: CUDA streams of the process.
        step: Optimizer step, from 0; -1 before the first.
        stage: Stage of the loop: load, forward, optimizer, zero_grad or other; "host" while a model is built.
    """

    def __init__(self, storages: Storages, modules: ModuleTracker, device: torch.device) -> None:
        self.trace = AllocationTrace()
        self.ledger = Ledger(self.release)
        self.step = -1
        self.stage = "load"
        self._modules = modules
        self._references = GradientReferences()
        self._side_streams: dict[int, int] = {}  # of allocations on other streams than the default one
        self._labels_at_end: dict[int, str] = {}
        storages.host_memory.on_block = self.pin
        self.operations = OperationWriter(storages, modules, self.ledger.number_at, lambda: len(self.trace.events))
        self._waits = CPUWaits()
        self.trace.cpu_waits = self._waits.noted
        self.streams = Streams(device, self._synchronize)
        self.operations.streams = self.streams

    def mark(self, name: str) -> None:
        """Note that something begins or ends here."""
        self.trace.marks.append(Mark(len(self.trace.events), name, self.step))

    def allocate(self, size: int, operation: str) -> int:
        """Write a request of ``size`` bytes on the current stream.

        Returns its number in the trace, or -1 for an empty request, for which PyTorch allocates nothing.
        """
        if size == 0:
            return -1
        number = len(self.trace.origins)
        if torch._C._current_graph_task_id() != -1:
            self._references.allocated(number)
        operation = self.operations.whole or operation
        self.trace.origins.append(Origin(operation, self.module, self.phase, self.step))
        stream = self.streams.executing.stream_id
        if stream:
            self._side_streams[number] = stream
        self.trace.events.append(Event("alloc", number, size, stream))
        return number

    def release(self, number: int) -> None:
        """Write that the allocation of that number is released."""
        if number >= 0:
            self.trace.events.append(Event("free", number, 0))

    def pin(self, size: int) -> None:
        """Note a new block of pinned host memory."""
        self.trace.pinned.append(PinnedBlock(len(self.trace.origins), size))

    def use_on_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that another stream uses a tensor's memory (``Tensor.record_stream``)."""
        number = self.number_of(tensor)
        if number is not None and number >= 0:
            self.trace.stream_uses.append(StreamUse(len(self.trace.events), number, stream.stream_id))

    def _synchronize(self, kind: SyncKind, stream: int, event: int) -> None:
        """Note a synchronisation of streams (see ``Streams``)."""
        self.operations.write_sync(kind, stream, event)
        self._waits.synchronize(kind, stream, event, len(self.trace.events))

    @property
    def module(self) -> str:
        """Path of the module at work, "" for none."""
        return self._modules.current()

    @property
    def phase(self) -> str:
        """Current phase: recompute and backward from autograd's state, the others as set by the loop."""
        if torch._C._current_graph_task_id() != -1:
            return "recompute" if self._modules.recomputing else "backward"
        return self.stage

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the allocation that holds a tensor (of a sparse one, its values); None if it is not on the GPU."""
        with _DISABLED():
            tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor
            return self.ledger.number_at(storage_key(tensor)) if tensor.is_meta else None

    def hold(self, tensor: torch.Tensor, operation: str, size: int | None = None) -> int | None:
        """Write the allocation of a tensor that came to life on the GPU; the death of its storage releases it."""
        storage = tensor.untyped_storage()
        if self.ledger.number_at(storage._cdata) is not None:
            return None
        number = self.allocate(storage.nbytes() if size is None else size, operation)
        self.ledger.assign(storage, number)
        return number

    def grow(self, storage: torch.UntypedStorage, operation: str) -> None:
        """Write that a storage got larger: CUDA copies it to a new allocation.

        Source: aten/src/ATen/native/cuda/Resize.cpp (``resize_bytes_cuda``).
        """
        number = self.allocate(storage.nbytes(), operation)
        known = self.ledger.take(storage)
        if known is not None:
            self.release(known)
        self.ledger.assign(storage, number)

    def label(self, tensor: torch.Tensor, label: str, *, again: bool = False) -> None:
        """Label the allocation behind a tensor, unless it has a label; with ``again`` also if it has one."""
        number = self.number_of(tensor)
        if number is not None and number >= 0 and (again or number not in self.trace.labels):
            self.trace.labels[number] = label

    def label_at_end(self, number: int, label: str) -> None:
        """Label an allocation when the run is over, unless it has a label by then: a gradient, for example, has one."""
        self._labels_at_end.setdefault(number, label)

    def end_run(self) -> None:
        """Complete the labels when the run is over."""
        for number, label in self._labels_at_end.items():
            self.trace.labels.setdefault(number, label)
