"""Recorder of one rank: also sees collectives, sharded tensors, and storages that are resized.

Collectives as operations: kind, size, and the ranks that take part.

Known values that collectives deliver.

Every rank runs the same code on a batch of the same size, so where this rank's values are known (sizes, counts of
tokens, flags), the others are taken to hold the same ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from trainatomy.results.prediction import GroupUse
from trainatomy.results.trace import CollectiveUse
from trainatomy.simulator.parallel.group import Topology
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.storages import forgetting
from trainatomy.simulator.values import Values

_c10d: Any = torch._C._distributed_c10d
_distributed: Any = distributed_c10d

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})

_KINDS = {
    "all_reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced"),
    "all_gather": (
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_coalesced_",
    ),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single"),
    "broadcast": ("broadcast_", "broadcast"),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "send": ("send",),
    "recv": ("recv_", "recv_any_source_"),
    "barrier": ("barrier", "monitored_barrier_"),
}
KINDS = {name: kind for kind, names in _KINDS.items() for name in names}
"""Kind of collective by the name of PyTorch's operator."""

PASSING = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""Operators that return their argument: their meta kernels make a new tensor, those of CUDA do not."""


@dataclass(eq=False, slots=True)
class Group:
    """Ranks that communicate, and what for; equal to itself alone, as to compare thousands of ranks takes long.

    Attributes:
        ranks: The ranks, in order.
        nodes: Number of machines that they are on.
        uses: What they were used for.
        names: Names of PyTorch's groups with these ranks; each is a communicator of its own.
    """

    ranks: tuple[int, ...]
    nodes: int
    uses: set[GroupUse] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


class Groups:
    """The groups of a process.

    Args:
        gpus_per_node: GPUs of each machine.
    """

    def __init__(self, gpus_per_node: int) -> None:
        self._gpus_per_node = gpus_per_node
        self._of_ranks: dict[tuple[int, ...], Group] = {}
        self._of_names: dict[str, Group] = {}

    def named(self, group: Any) -> Group:
        """Return the ranks of one of PyTorch's groups."""
        name = str(group.group_name)
        if name not in self._of_names:
            self._of_names[name] = self.of(tuple(dist.get_process_group_ranks(group)))
        return self._of_names[name]

    def of(self, ranks: tuple[int, ...]) -> Group:
        """Return the group of these ranks."""
        if ranks not in self._of_ranks:
            self._of_ranks[ranks] = Group(ranks, len({rank // self._gpus_per_node for rank in ranks}))
        return self._of_ranks[ranks]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that was called.

    Attributes:
        kind: A key of ``_KINDS``.
        bytes: Size of the whole message, as nccl-tests counts it: output of an all-gather, input of a reduce-scatter.
        group: The ranks that take part.
        name: Name of PyTorch's group: several groups may have the same ranks.
        inputs: Tensors that this rank sends.
        outputs: Tensors that it receives.
        is_async: True if the caller goes on before the collective is over, and waits for it later.
        members: All ranks of PyTorch's group; of a message, more than the two in ``group``.
        peer: The other rank of a message; None for a collective of the group.
        reduction: Name of the operation that a functional collective reduces with, else empty.
    """

    kind: str
    bytes: int
    group: Group
    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    is_async: bool
    members: Group
    peer: int | None
    reduction: str


def collective_of(groups: Groups, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Collective:
    """Describe a call of an operator in one of ``NAMESPACES``."""
    schema = func._schema
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    sent = [tensor for name in named if name.startswith(("input", "tensor")) for tensor in tensors_in(named[name])]
    received = [tensor for name in named if name.startswith("output") for tensor in tensors_in(named[name])]
    received = received or tensors_in(result) or sent
    sent = sent or received
    group = _group(named)
    members = groups.named(group)
    peer = _peer(members.ranks, named)
    return Collective(
        KINDS.get(schema.name.rpartition("::")[2], ""),
        max(sum(tensor.nbytes for tensor in sent), sum(tensor.nbytes for tensor in received)),
        members if peer is None else groups.of(tuple(sorted({dist.get_rank(), peer}))),
        str(group.group_name),
        tuple(sent),
        tuple(received),
        bool(named.get("async_op", named.get("asyncOp", True))),
        members,
        peer,
        named["reduce_op"] if isinstance(named.get("reduce_op"), str) else "",
    )


def finished(value: list[torch.Tensor]) -> Any:
    """Return the ``Work`` of a collective that is done; DDP's reducer asks its future for the tensors."""
    future: Any = torch.futures.Future()
    future.set_result(value)
    return _c10d._create_work_from_future(future).boxed()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument, those in nested lists too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _peer(group: tuple[int, ...], arguments: Mapping[str, Any]) -> int | None:
    """Return the rank that a message goes to or comes from; None for other collectives.

    NCCL makes a communicator for each such pair (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``pointToPoint``).
    """
    peer = arguments.get("dst", arguments.get("src"))
    return None if peer is None or "tag" not in arguments else group[peer]


def _group(arguments: Mapping[str, Any]) -> Any:
    """Return the group among the arguments: an object for c10d, also a name in functional collectives."""
    group: Any = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        group = _distributed._resolve_process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return group


_MOST_ELEMENTS = 1 << 16
"""Elements of the largest tensor whose values are followed."""
_REDUCED: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda value, ranks: value * ranks,
    "product": lambda value, ranks: value**ranks,
    **dict.fromkeys(("avg", "max", "min", "band", "bor"), lambda value, ranks: value),
}
"""Result of a reduction of one value of all ranks, by the name of the operation in lower case."""


def known(values: Values, tensors: Sequence[torch.Tensor], kind: str) -> dict[int, torch.Tensor]:
    """Return the values that are known of small strided tensors, by the identity of each.

    For an all-to-all, ``kind``, those count that follow from a router's assumed choices: with it, ranks tell each other
    how many tokens they send to each expert.
    """
    small = [one for one in tensors if one.is_meta and one.layout == torch.strided and one.numel() <= _MOST_ELEMENTS]
    counts = kind == "all_to_all"
    found = ((id(one), values.of(one, with_data=counts and not one.is_floating_point())) for one in small)
    return {key: value for key, value in found if value is not None}


def learn(values: Values, collective: Collective, sent: Mapping[int, torch.Tensor], reduction: str) -> None:
    """Remember what a collective delivers, and forget what its outputs held.

    Args:
        values: Known values.
        collective: The collective, which has run.
        sent: What was known of its tensors before (see ``known``).
        reduction: Name of the operation that it reduces with; empty where unknown.
    """
    if collective.kind in ("send", "barrier"):
        return
    inputs, outputs = collective.inputs, collective.outputs
    for index, output in enumerate(outputs):
        value = sent.get(id(inputs[index * len(inputs) // len(outputs)])) if inputs else None
        found = None if value is None else _delivered(collective, value, output, reduction)
        values.forget(output)
        if found is not None:
            values.learn(output, found)


def _delivered(
    collective: Collective, value: torch.Tensor, output: torch.Tensor, reduction: str
) -> torch.Tensor | None:
    """Return the values of an output, given those of its input; None if they do not follow."""
    ranks = len(collective.group.ranks)
    if collective.kind == "all_gather" and value.numel() and output.numel() % value.numel() == 0:
        return value.flatten().repeat(output.numel() // value.numel()).view(output.shape)
    if collective.kind in ("all_reduce", "reduce") and reduction in _REDUCED:
        return _REDUCED[reduction](value, ranks).to(output.dtype)
    if collective.kind == "all_to_all" and value.numel() == output.numel() and value.numel() % ranks == 0:
        to_this_rank = value.flatten().chunk(ranks)[collective.group.ranks.index(dist.get_rank())]
        return to_this_rank.repeat(ranks).view(output.shape)
    if collective.kind == "broadcast":
        return value
    return None


def reduction_of(arguments: Sequence[Any]) -> str:
    """Return the name of the operation among the arguments of a reduction by ``ProcessGroup``, in lower case."""
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    for one in arguments:
        named = getattr(one, "reduceOp", one)  # options have it as an attribute
        for name, kind in kinds:
            if isinstance(named, (dist.ReduceOp, dist.ReduceOp.RedOpType)) and named == kind:
                return name.lower()
    return "" if arguments else "sum"


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
        self._group_streams: dict[Group, int] = {}
        self._last_of_group: dict[Group, int] = {}
        self._pending: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # ends with the storage
        self._step = self.operations.operations
        self._groups = Groups(topology.gpus_per_node)
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

    @property
    def awaits(self) -> bool:
        """True if operations that are written have to wait for others, or for collectives of their tensors."""
        return super().awaits or bool(self._pending and self.operations.recording)

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
        self.transfers += 1
        name = func._schema.name.rpartition("::")[2]
        if name in PASSING:
            with _DISABLED():
                self._wait_for_collectives(args)
            return args[0]
        event = len(self.trace.events)
        writer = self.operations
        with _DISABLED():
            sent = known(self.values, tensors_in(args), KINDS.get(name, ""))
        before, writer.whole = writer.whole, f"nccl::{KINDS.get(name, name)}"  # one operation, written below
        try:
            result = super().__torch_dispatch__(func, (), args, kwargs)
        finally:
            writer.whole = before
        with _DISABLED():
            found = collective_of(self._groups, func, args, kwargs, result)
            self._note(found, event, is_c10d=func.namespace == "c10d")
            learn(self.values, found, sent, found.reduction or self.reduction)
            self.reduction = ""
        if func.namespace != "c10d":
            return result
        if isinstance(result, tuple) and len(result) == 2:
            return result[0], finished(tensors_in(result[0]))
        return finished([] if found.kind == "send" else list(found.outputs))  # NCCL lets go of what was sent

    def _note(self, collective: Collective, event: int, *, is_c10d: bool) -> None:
        """Write a collective, and label its buffers unless they are activations (functional collectives)."""
        used = collective.members if self.batching else collective.group
        if not used.uses:
            self.groups[used.ranks], self.group_names[used.ranks] = used.uses, used.names
        used.uses.add(GroupUse(collective.kind, collective.peer))
        used.names.add(collective.name)
        if is_c10d:
            numbers = {self.number_of(tensor) for tensor in (*collective.inputs, *collective.outputs)}
            found = tuple(sorted(number for number in numbers if number is not None and number >= 0))
            for number in found if collective.kind != "send" else ():  # a stage sends its own activations
                self.label_at_end(number, "communication_buffer")
            # A pipeline's schedule waits for each message by its work, which lets go of the tensors.
            if collective.is_async and collective.kind not in ("send", "recv"):
                in_backward = torch._C._current_graph_task_id() != -1
                self.trace.collectives.append(CollectiveUse(event, found, in_backward))
        if len(collective.group.ranks) > 1:
            self._write_collective(collective, event)

    def _write_collective(self, collective: Collective, event: int) -> None:
        """Write the operation, after those that it has to wait for."""
        writer, group = self.operations, collective.group
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
        numbers = {"bytes": collective.bytes, "ranks": len(group.ranks), "nodes": group.nodes}
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
