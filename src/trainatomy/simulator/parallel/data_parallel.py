"""``torch.nn.DataParallel`` in a simulated process: PyTorch's Python runs as it is, what it calls in C++ is here.

Sources: torch/csrc/cuda/comm.cpp (``broadcast_coalesced``, ``scatter``, ``gather``), torch/csrc/cuda/nccl.cpp
(``is_available``), torch/csrc/utils/tensor_flatten.cpp (``take_tensors``), torch/nn/parallel, torch 2.9-2.13.

One process that works on several GPUs (``torch.nn.DataParallel``): where its tensors are, and what one GPU does.

All GPUs' work is executed, in one thread; the trace and the operations are those of one GPU.  What other GPUs do takes
no time of their own: they have the same chunk of the batch, or a smaller last one, and are taken to keep pace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._utils import _reorder_tensors_as
from torch.cuda import nccl
from torch.nn.parallel import _functions, comm

from trainatomy.operators.allocation.workspaces import Workspace
from trainatomy.results.prediction import GroupUse
from trainatomy.simulator.driver import CurrentDevice, DeviceContext
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.parallel.group import Topology
from trainatomy.simulator.parallel.recorder import tensors_in
from trainatomy.simulator.placement import Placement
from trainatomy.simulator.recorder import Recorder

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
        self.transfers += 1
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
        self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None, *how: bool, **options: Any
    ) -> torch.Tensor:
        """Copy a tensor between host and GPU or between GPUs, as ``Tensor.to`` does."""
        if device.type != "cuda":
            return super().move(tensor, device, dtype, *how, **options)
        if not self.is_device(tensor) or self.gpu_of(tensor) == device:
            with self.on(device):
                return super().move(tensor, device, dtype, *how, **options)
        return self.between(tensor, device, dtype or tensor.dtype)

    def between(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Copy a tensor to another GPU; one that changes its dtype does so where it is."""
        source = tensor.to(dtype)
        with self.recorder.placing(device.index):
            copied: torch.Tensor = torch.ops.aten._to_copy(source)
        self.recorder.peer_copy(source, copied)
        return copied


_nn: Any = torch._C._nn
# The package has functions of these names.
_data_parallel: Any = import_module("torch.nn.parallel.data_parallel")
_parallel_apply: Any = import_module("torch.nn.parallel.parallel_apply")


def install(stack: contextlib.ExitStack, placement: ReplicaPlacement, modules: ModuleTracker) -> None:
    """Patch what ``DataParallel`` calls; ``stack`` undoes it."""
    recorder = placement.recorder

    def patch(target: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(target, name, value, create=True))

    transfers = Transfers(placement)
    patch(torch._C, "_broadcast_coalesced", _as_meta(transfers.broadcast_coalesced))
    patch(torch._C, "_scatter", _as_meta(transfers.scatter))
    patch(torch._C, "_gather", _as_meta(transfers.gather))
    patch(torch._C, "_nccl_reduce", _as_meta(transfers.reduce))
    patch(nccl, "is_available", _can_use_nccl)
    patch(comm, "reduce_add_coalesced", _labelling(comm.reduce_add_coalesced, recorder))
    patch(_functions.Broadcast, "forward", staticmethod(_broadcasting(_functions.Broadcast.forward)))
    patch(_functions.Broadcast, "backward", staticmethod(_with_zeros(_functions.Broadcast.backward, transfers)))
    patch(_data_parallel, "replicate", _replicating(_data_parallel.replicate, modules, recorder))
    patch(_parallel_apply, "threading", SimpleNamespace(Lock=threading.Lock, Thread=_thread_class(recorder)))


class Transfers:
    """Copies that ``DataParallel`` makes between GPUs.

    Args:
        placement: Location of the tensors.
    """

    def __init__(self, placement: ReplicaPlacement) -> None:
        self._placement = placement
        self._recorder = placement.recorder

    def broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
    ) -> list[list[torch.Tensor]]:
        """Copy tensors from the first GPU to the others, flattened to buffers; the copies are views of the buffers."""
        outputs: list[list[torch.Tensor]] = [list(tensors), *([] for _ in devices[1:])]
        for group in take_tensors(tensors, buffer_size):
            flat = _nn.flatten_dense_tensors(group)
            received = [self._empty(flat.shape, flat.dtype, gpu) for gpu in devices[1:]]
            self._recorder.buffer([flat])
            self._recorder.label_all(received, "replica_weight")
            self._recorder.collective("broadcast", [flat, *received])
            for output, whole in zip(outputs[1:], received, strict=True):
                output.extend(part.data for part in _nn.unflatten_dense_tensors(whole, group))
        return [outputs[0], *(list(_reorder_tensors_as(output, tensors)) for output in outputs[1:])]

    def scatter(
        self,
        tensor: torch.Tensor,
        devices: Sequence[int],
        chunk_sizes: Sequence[int] | None = None,
        dim: int = 0,
        streams: Sequence[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Copy the chunks of a tensor to the GPUs; a chunk that stays on its GPU is a view."""
        chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
        found = []
        for place, (chunk, gpu) in enumerate(zip(chunks, devices, strict=False)):
            with torch.cuda.stream(streams[place] if streams else None):
                found.append(self._placement.move(chunk, self._placement.check(gpu)))
        if torch._C._current_graph_task_id() == -1:  # in backward, these are gradients of outputs
            self._recorder.label_all(found, "input")
        return found

    def gather(self, tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
        """Concatenate tensors of several GPUs on one of them."""
        target = self._placement.check(destination)
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        whole = self._empty(torch.Size(shape), tensors[0].dtype, target.index, _memory_format(tensors))
        for part, tensor in zip(whole.split([one.shape[dim] for one in tensors], dim), tensors, strict=True):
            if self._placement.gpu_of(tensor) == target:
                part.copy_(tensor)
                continue
            source = self._sendable(tensor)
            with self._recorder.placing(target.index):
                part.copy_(source)
            self._recorder.peer_copy(source, part)
        return whole

    def reduce(self, inputs: Sequence[torch.Tensor], output: torch.Tensor, *_: Any) -> None:
        """Add tensors of several GPUs on one of them."""
        self._recorder.buffer([*inputs, output])
        self._recorder.collective("reduce", inputs)

    def zeros(self, of: tuple[torch.Size, torch.dtype], gpu: int) -> torch.Tensor:
        """Make zeros of a shape and dtype on a GPU."""
        shape, dtype = of
        with self._placement.on(gpu):
            return torch.zeros(shape, dtype=dtype, device="meta")

    def _empty(
        self, shape: torch.Size, dtype: torch.dtype, gpu: int, memory_format: Any = torch.contiguous_format
    ) -> torch.Tensor:
        with self._recorder.placing(gpu):
            return torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is copied to another GPU.

        Without access to each other's memory, GPUs copy contiguous memory only (aten/src/ATen/native/cuda/Copy.cu,
        ``copy_requires_temporaries``).
        """
        return tensor if self._recorder.topology.peer_access else tensor.contiguous()


def take_tensors(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in groups of one dtype; a group is full when it has ``limit`` bytes or more."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        group = groups.setdefault(tensor.dtype, [])
        group.append(tensor)
        if sum(one.numel() * one.element_size() for one in group) >= limit:
            yield groups.pop(tensor.dtype)
    yield from groups.values()


def _as_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sees tensors as they are, on the meta device."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*arguments, **keywords)

    return run


def _memory_format(tensors: Sequence[torch.Tensor]) -> Any:
    """Return the memory format that tensors share: channels last, if all are."""
    if tensors[0].dim() == 4 and all(one.is_contiguous(memory_format=torch.channels_last) for one in tensors):
        return torch.channels_last
    return torch.contiguous_format


def _can_use_nccl(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether NCCL takes the tensors, as ``torch.cuda.nccl.is_available`` of a build with CUDA does."""
    if not all(tensor.is_cuda and tensor.is_contiguous() and not tensor.is_sparse for tensor in tensors):
        return False
    return len({tensor.get_device() for tensor in tensors}) == len(tensors)


def _labelling(reduce: Callable[..., Any], recorder: ReplicaRecorder) -> Callable[..., Any]:
    """Return ``reduce_add_coalesced`` that labels the gradients of each GPU."""

    def reduce_add_coalesced(inputs: Sequence[Sequence[torch.Tensor]], *arguments: Any, **keywords: Any) -> Any:
        for gradients in inputs:
            recorder.label_all(gradients, "gradient")
        return reduce(inputs, *arguments, **keywords)

    return reduce_add_coalesced


def _broadcasting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Broadcast.forward`` that leaves zeros for missing gradients to ``_with_zeros``."""

    def broadcast(ctx: Any, target_gpus: Sequence[int], *inputs: torch.Tensor) -> Any:
        outputs = forward(ctx, target_gpus, *inputs)
        ctx.set_materialize_grads(False)
        ctx.replicated = [(one.shape, one.dtype) for one in inputs]
        return outputs

    return broadcast


def _with_zeros(backward: Callable[..., Any], transfers: Transfers) -> Callable[..., Any]:
    """Return ``Broadcast.backward`` that makes zeros where a weight has no gradient, such as a frozen one.

    Autograd makes them on the GPU of each output, which a meta tensor does not name (``PyNode::apply`` in
    torch/csrc/autograd/python_function.cpp).
    """

    def reduce(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        count = len(ctx.replicated)
        made = (
            transfers.zeros(ctx.replicated[place % count], ctx.target_gpus[place // count]) if one is None else one
            for place, one in enumerate(gradients)
        )
        return backward(ctx, *made)

    return reduce


def _replicating(
    replicate: Callable[..., Any], modules: ModuleTracker, recorder: ReplicaRecorder
) -> Callable[..., Any]:
    """Return ``replicate`` that names the modules of the copies, and writes the CPU's work of making them."""

    def replicate_model(network: nn.Module, devices: Sequence[int], detach: bool = False) -> list[nn.Module]:
        copies: list[nn.Module] = replicate(network, devices, detach)
        originals = list(network.modules())
        for copy in copies:
            for own, original in zip(copy.modules(), originals, strict=True):
                modules.learn_copy(own, original)
        recorder.replicated(len(copies) * len(originals))
        return copies

    return replicate_model


def _thread_class(recorder: ReplicaRecorder) -> type:
    """Return a class in place of ``threading.Thread``, whose threads run one after the other in this one.

    The modes of the simulation, the state of autograd and that of autocast belong to a thread.  A new thread of a GPU
    has autocast off and its dtype float16, whatever the main thread has: ``parallel_apply`` switches it on in each and
    names no dtype, so that replicas compute in float16 under autocast for bfloat16.
    """

    class Thread:
        def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
            self._target, self._args = target, args

        def start(self) -> None:
            gpu = self._args[4]
            enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)
            try:
                with recorder.thread(gpu):
                    self._target(*self._args)
            finally:
                torch.set_autocast_enabled("cuda", enabled)
                torch.set_autocast_dtype("cuda", dtype)

        def join(self) -> None: ...

    return Thread
