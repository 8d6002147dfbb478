"""Recorder of one rank: also sees collectives, sharded tensors, and storages that are resized."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from trainatomy.results.plan import GroupUse
from trainatomy.results.trace import CollectiveUse
from trainatomy.simulator.parallel import exchanged
from trainatomy.simulator.parallel.collectives import (
    KINDS,
    NAMESPACES,
    PASSING,
    Collective,
    collective_of,
    finished,
    tensors_in,
)
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.storages import forgetting
from trainatomy.simulator.topology import Topology

_WRAPPERS = (DTensor, AsyncCollectiveTensor)
_DISABLED = torch._C.DisableTorchFunction


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is sharded or still on its way."""
    while isinstance(tensor, _WRAPPERS):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor


class RankRecorder(Recorder):
    """Recorder of one rank of a training on several GPUs; see ``Recorder``.

    An operation on a sharded tensor is seen as the operations on this rank's part that it consists of.  A collective is
    written as an operation ``nccl::<kind>``: on the current stream if its caller waits for it, else on a stream of its
    group's own, and the first operation on one of its tensors waits for it.

    Attributes:
        paused: True while operations run that a GPU would not see, such as those of DTensor's sharding propagation.
        batching: True while several messages are sent and received at once, on the communicator of their whole group.
        topology: Place of the process.
        reduction: Name of the operation that the next collective of a ``ProcessGroup`` reduces with, where it is known.
        groups: What each group of ranks was used for.
        group_names: Names of the groups with these ranks that were used; each is a communicator of its own.
    """

    communicates = True

    def __init__(self, *args: Any, topology: Topology, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trace.rank = topology.rank
        self.topology = topology
        self.paused = False
        self.batching = False
        self.reduction = ""
        self._group_streams: dict[tuple[int, ...], int] = {}
        self._last_of_group: dict[tuple[int, ...], int] = {}
        self._pending: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # ends with the storage
        self._step = self.operations.operations
        self.groups: dict[tuple[int, ...], set[GroupUse]] = {}
        self.group_names: dict[tuple[int, ...], set[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, _WRAPPERS) for each in types):
            self.operations.count("sharded_calls")
            return NotImplemented  # the subclass runs the operation on this rank's tensors, which comes back here
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func.namespace in NAMESPACES:
            return self._communicate(func, args, kwargs)
        if self._pending:
            self._wait_for_collectives(args)
        if func._schema.name == "aten::copy_" and self._comes_to_host(args):
            return self._read(*args[:2])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the allocation that holds this rank's part of a tensor."""
        with _DISABLED():
            return super().number_of(local(tensor))

    def hold(self, tensor: torch.Tensor, operation: str, size: int | None = None) -> int | None:
        """Write the allocation of a tensor, unless it was written to in host memory."""
        if self._storages.is_host_key(tensor.untyped_storage()._cdata):
            return None
        return super().hold(tensor, operation, size)

    # -- storages ------------------------------------------------------------------------------------------------------

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """Note that a storage gave its memory back (``after`` is 0) or took memory.

        FSDP takes and frees the memory of whole parameters so (torch/distributed/fsdp, ``_alloc_storage`` and
        ``free_storage``), which no operation shows.
        """
        if self.paused:
            return
        self.operations.count("resized_storages")
        known = self.ledger.take(storage)
        if known is not None:
            self.release(known)
        elif before or self._storages.is_host_key(storage._cdata):
            return
        number = self.allocate(after, "resize_")
        if after:
            self.label_at_end(number, "gathered_weight")
        self.ledger.assign(storage, number)

    def _comes_to_host(self, args: tuple[Any, ...]) -> bool:
        with _DISABLED():
            return not args[0].is_meta and args[1].is_meta

    def _read(self, host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to a tensor of the host: known values, else the host's own.

        DDP sends the order of its buckets from rank 0 to the others through the GPU, and reads it back.
        """
        with _DISABLED():
            known = self.values.of(tensor)
            return host if known is None else host.copy_(known)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective: what it returns is allocated, its communication is written as an operation."""
        name = func._schema.name.rpartition("::")[2]
        if name in PASSING:
            with _DISABLED():
                self._wait_for_collectives(args)
            return args[0]
        event = len(self.trace.events)
        writer = self.operations
        with _DISABLED():
            sent = exchanged.known(self.values, tensors_in(args), KINDS.get(name, ""))
        before, writer.whole = writer.whole, f"nccl::{KINDS.get(name, name)}"  # one operation, written below
        try:
            result = super().__torch_dispatch__(func, (), args, kwargs)
        finally:
            writer.whole = before
        with _DISABLED():
            found = collective_of(func, args, kwargs, result)
            self._note(found, event, is_c10d=func.namespace == "c10d")
            exchanged.learn(self.values, found, sent, found.reduction or self.reduction)
            self.reduction = ""
        if func.namespace != "c10d":
            return result
        if isinstance(result, tuple) and len(result) == 2:
            return result[0], finished(tensors_in(result[0]))
        return finished([] if found.kind == "send" else list(found.outputs))  # NCCL lets go of what was sent

    def _note(self, collective: Collective, event: int, *, is_c10d: bool) -> None:
        """Write a collective, and label its buffers unless they are activations (functional collectives)."""
        used = collective.members if self.batching else collective.ranks
        self.groups.setdefault(used, set()).add(GroupUse(collective.kind, collective.peer))
        self.group_names.setdefault(used, set()).add(collective.group)
        if is_c10d:
            numbers = {self.number_of(tensor) for tensor in (*collective.inputs, *collective.outputs)}
            found = tuple(sorted(number for number in numbers if number is not None and number >= 0))
            for number in found if collective.kind != "send" else ():  # a stage sends its own activations
                self.label_at_end(number, "communication_buffer")
            # A pipeline's schedule waits for each message by its work, which lets go of the tensors.
            if collective.is_async and collective.kind not in ("send", "recv"):
                in_backward = torch._C._current_graph_task_id() != -1
                self.trace.collectives.append(CollectiveUse(event, found, in_backward))
        if len(collective.ranks) > 1:
            self._write_collective(collective, event)

    def _write_collective(self, collective: Collective, event: int) -> None:
        """Write the operation, after those that it has to wait for."""
        writer, group = self.operations, collective.ranks
        if writer.operations is not self._step:  # another step is written: indices of the one before mean nothing in it
            self._step = writer.operations
            self._pending.clear()
            self._last_of_group.clear()
        if not writer.recording:
            return
        before = [self._last_of_group[group]] if group in self._last_of_group else []
        stream = None
        if collective.is_async:
            stream = self._group_streams.setdefault(group, -1 - len(self._group_streams))
        nodes = len({rank // self.topology.gpus_per_node for rank in group})
        numbers = {"bytes": collective.bytes, "ranks": len(group), "nodes": nodes}
        position = writer.write_collective(
            f"nccl::{collective.kind}", collective.inputs, collective.outputs, numbers, event, stream, before
        )
        self._last_of_group[group] = position
        if collective.is_async:
            for tensor in (*collective.inputs, *collective.outputs):
                storage = tensor.untyped_storage()
                key = storage._cdata
                self._pending[key] = position, weakref.ref(storage, forgetting(self._pending, key))

    def _wait_for_collectives(self, args: tuple[Any, ...]) -> None:
        """Let the next operation wait for the collectives of its tensors that are still running."""
        with _DISABLED():
            for tensor in tensors_in(args):
                if not isinstance(tensor, _WRAPPERS) and tensor.layout == torch.strided:
                    found = self._pending.pop(tensor.untyped_storage()._cdata, None)
                    if found is not None:
                        self.operations.wait_for(found[0])
