"""Writes the allocation trace of a simulated process, and knows which allocation holds each tensor.

Ledger of the allocation of the trace that each storage lies in.

Writes what the allocation rules plan into the allocation trace.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Any

import torch

from trainatomy.operators.allocation.plan import Free, Out, Plan, Scratch, Trial
from trainatomy.operators.allocation.workspaces import Workspace
from trainatomy.results.trace import (
    PRIVATE_POOL,
    AllocationTrace,
    Event,
    Mark,
    PinnedBlock,
    PlansTried,
    StreamUse,
    shared_origin,
)
from trainatomy.simulator.autograd import GradientReferences
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.operations import OperationWriter
from trainatomy.simulator.storages import Storages, storage_key
from trainatomy.simulator.streams import CPUWaits, Streams, SyncKind

NO_ALLOCATION = -1
"""Number of what lies on the GPU and was not allocated: an empty tensor, an output of a CUDA graph."""


class Ledger:
    """The allocations of all storages on the GPU; a storage that dies releases its own."""

    def __init__(self, release: Callable[[int], None]) -> None:
        """Take the function that writes that the allocation of a number is released."""
        self._release = release
        self._entries: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def number_at(self, key: int) -> int | None:
        """Return the allocation of the storage with this key; None if it has none, as in host memory."""
        entry = self._entries.get(key)
        return entry[0] if entry else None

    def assign(self, storage: torch.UntypedStorage, number: int) -> None:
        """Let an allocation belong to a storage from now on."""
        key = storage._cdata

        def died(_: object) -> None:
            if self.number_at(key) == number:
                del self._entries[key]
                self._release(number)

        self._entries[key] = (number, weakref.ref(storage, died))

    def take(self, storage: torch.UntypedStorage) -> int | None:
        """Take the allocation of a storage away from it, without a release; None if it has none."""
        entry = self._entries.pop(storage._cdata, None)
        return entry[0] if entry else None

    def disown(self, number: int) -> None:
        """Let the storage of an allocation, if it lives, be on the GPU without one of its own."""
        for known, reference in list(self._entries.values()):
            if known == number and (storage := reference()) is not None:
                self.assign(storage, NO_ALLOCATION)

    def forget(self, number: int) -> None:
        """Let the storage of an allocation die without a release, as the trace has it already."""
        for key, (known, _) in self._entries.items():
            if known == number:
                del self._entries[key]
                return

    def stand_in(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
        """Return a tensor for an allocation that is in the trace already."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            self.assign(tensor.untyped_storage(), number)
        return tensor


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
        pool: Private pool that allocations come from, 0 for none.
        in_pools: Events that made the live allocations of private pools, by their numbers.
    """

    def __init__(self, storages: Storages, modules: ModuleTracker, device: torch.device) -> None:
        self.trace = AllocationTrace()
        self.ledger = Ledger(self.release)
        self.step = -1
        self.stage = "load"
        self.pool = 0
        self.in_pools: dict[int, Event] = {}
        self._modules = modules
        self._references = GradientReferences()
        self._side_streams: dict[int, int] = {}  # of allocations on other streams than the default one
        self._labels_at_end: dict[int, str] = {}
        storages.host_memory.on_block = self.pin
        storages.host_memory.stage = lambda: self.stage
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
            return NO_ALLOCATION
        number = len(self.trace.origins)
        if torch._C._current_graph_task_id() != -1:
            self._references.allocated(number)
        operation = self.operations.whole or operation
        self.trace.origins.append(shared_origin(operation, self.module, self.phase, self.step))
        stream = self.streams.executing.stream_id
        if stream:
            self._side_streams[number] = stream
        event = Event("alloc", number, size, stream + PRIVATE_POOL * self.pool)
        if self.pool:
            self.in_pools[number] = event
        self.trace.events.append(event)
        return number

    def release(self, number: int) -> None:
        """Write that the allocation of that number is released."""
        if number >= 0:
            self.in_pools.pop(number, None)
            self.trace.events.append(Event("free", number, 0))

    def allocate_again(self, made: Event) -> int:
        """Write an allocation in the place of a released one in its private pool, and return its number."""
        trace, old, number = self.trace, made.allocation, len(self.trace.origins)
        trace.origins.append(trace.origins[old])
        if old in trace.labels:
            trace.labels[number] = trace.labels[old]
        trace.places[number] = old
        self.in_pools[number] = made._replace(allocation=number)
        trace.events.append(self.in_pools[number])
        return number

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


Allocate = Callable[[int, str], int]
Hold = Callable[[torch.Tensor, str, int | None], int | None]


class PlanWriter:
    """Writer of plans, with the libraries' decisions that hold for later calls."""

    def __init__(self, trace: AllocationTrace, allocate: Allocate, release: Callable[[int], None], hold: Hold) -> None:
        """Take a trace, and what writes to it.

        Args:
            trace: Allocations so far.
            allocate: Writes a request of some bytes by an operation, and returns its number.
            release: Writes that the allocation of a number is released.
            hold: Writes the allocation of a tensor of an operation, which takes the bytes that are given or its own.
        """
        self._trace = trace
        self._allocate = allocate
        self._release = release
        self._hold = hold
        self._choices = defaultdict[Hashable, int](count().__next__)  # each thread decides for itself
        self._tried = set[Hashable]()

    def write(
        self, plan: Plan, name: str, outputs: Sequence[torch.Tensor], workspaces: Sequence[Workspace] = ()
    ) -> None:
        """Write what a plan says of a call of an operator, then the outputs that it does not mention.

        ``workspaces`` are those that libraries allocate for the kernel alone.
        """
        scratch: list[tuple[str, int]] = []
        for item in plan:
            if isinstance(item, Scratch):
                scratch.append((item.name, number := self._allocate(item.bytes, f"{name} ({item.name})")))
                if item.choice is not None:
                    self._trace.choices[number] = self._decision(item.choice)
            elif isinstance(item, Out):
                if item.number < len(outputs):
                    self._hold(outputs[item.number], name, item.bytes)
            elif isinstance(item, Free):
                found = next(i for i, (key, _) in enumerate(scratch) if key == item.name)
                self._release(scratch.pop(found)[1])
            else:
                self._try(item, name)
        for tensor in outputs:
            self._hold(tensor, name, None)
        for workspace in workspaces:
            self._release(self._allocate(workspace.bytes, f"{name} ({workspace.name})"))
        for _, number in reversed(scratch):
            self._release(number)

    def _decision(self, choice: Hashable) -> int:
        """Return the number of a library's decision; each thread decides for itself, that of autograd too."""
        return self._choices[choice, torch._C._current_graph_task_id() != -1]

    def _try(self, trial: Trial, name: str) -> None:
        """Write what a trial of algorithms allocates, and that the cache is emptied after it."""
        tried = trial.key, torch._C._current_graph_task_id() != -1
        if tried in self._tried:
            return
        self._tried.add(tried)
        if not trial.workspaces:
            return
        number = self._allocate(max(trial.workspaces), f"{name} (trial of cuDNN's plans)")
        self._trace.choices[number] = self._decision(trial.choice)
        self._trace.trials[number] = PlansTried(trial.workspaces, trial.timed)
        self._release(number)
        self._trace.events.append(Event("empty_cache", -1, 0))
