"""Places where PyTorch's parallel code asks for what one simulated rank does not have, each with its reason."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, _dispatch, _random
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.errors import WorkloadError
from trainatomy.simulator.autograd import Handler, assignments
from trainatomy.simulator.parallel import checkpoints, sharding
from trainatomy.simulator.parallel import recorder as exchanged
from trainatomy.simulator.parallel.recorder import RankRecorder, local
from trainatomy.training.stored_weights import is_packed

_c10d: Any = torch._C._distributed_c10d
_DISABLED = torch._C.DisableTorchFunction
_REFUSES_SHARED = (2, 13)
"""Release in which FSDP2 began to refuse weights that several of its groups share (accelerate 1.15 names it)."""
_LATE_STATES = (2, 13)
"""Release in which Adagrad makes states for parameters that it did not have when it was made (2.11 does not)."""
_SINGLE_MESSAGES = (2, 13)
"""Release in which a pipeline's messages in one direction left the batch, and its stages began to vote on shapes."""


def install(stack: contextlib.ExitStack, recorder: RankRecorder, torch_version: tuple[int, int]) -> None:
    """Patch PyTorch for one rank of a training with a release of PyTorch; ``stack`` undoes it."""

    def patch(target: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(target, name, value))

    patch(torch.UntypedStorage, "resize_", _resizing(recorder))
    sharding.install(patch, recorder)
    for module in (_dispatch, _random):
        # DTensor keeps offsets of CUDA's generator, so that ranks draw different numbers; no memory depends on them.
        patch(module, "is_rng_supported_mesh", lambda mesh: False)
    # Ranks compare the shapes of their parameters by values when DDP begins.
    patch(distributed, "_verify_param_shape_across_processes", lambda *args, **kwargs: None)
    # It measures times with CUDA events, and warns that meta tensors have none.
    patch(_c10d.Logger, "set_runtime_stats_and_log", lambda logger: None)
    patch(dist, "barrier", _barrier(dist.barrier))
    for name in ("allreduce", "reduce"):
        patch(dist.ProcessGroup, name, _reducing(getattr(dist.ProcessGroup, name), recorder))
    _install_fsdp1(patch, recorder)
    _install_fsdp2(patch, torch_version)
    if torch_version < _LATE_STATES:
        patch(torch.optim.Adagrad, "_init_group", _with_early_states(torch.optim.Adagrad._init_group))
    _install_pipelines(patch, recorder, torch_version)
    checkpoints.install(patch, recorder)


def handlers(known: dict[Any, Handler], keep_on_host: Callable[[torch.Tensor], None]) -> dict[Any, Handler]:
    """Return handlers of functions for sharded tensors: ``known`` ones ask this rank's part.

    The storage of a ``DTensor`` is that of a wrapper.  Accelerate and DDP find parameters by their addresses, so each
    storage has one.
    """
    getters: tuple[Any, ...] = (torch.Tensor.device, torch.Tensor.is_cuda, torch.Tensor.is_cpu)
    asked = {getter.__get__: _of_local(known[getter.__get__]) for getter in getters}
    return {
        **asked,
        **assignments(keep_on_host, local),
        torch.Tensor.to: _to(known[torch.Tensor.to]),
        torch.Tensor.data_ptr: _address,
    }


def without_data(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give a model meta tensors for those that its constructor made with data; yield each with the one it replaces.

    Legacy constructors such as ``torch.Tensor(8)`` ignore the device of the context.  FSDP assigns each tensor the data
    of its copy on the GPU, which PyTorch allows for tensors of one kind only.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta or tensor.layout != torch.strided or is_packed(tensor):
                    continue
                if id(tensor) not in made:
                    with _disable_current_modes():  # it is no allocation of the GPU
                        twin = torch.empty_like(tensor, device="meta", requires_grad=False)
                    if isinstance(tensor, nn.Parameter):
                        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = twin
                    yield twin, tensor
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``barrier`` that makes its tensors of one element in Python where it names a GPU, which is not there.

    Sources: ``ProcessGroup::barrier`` and ``ProcessGroupNCCL::barrier`` (torch/csrc/distributed/c10d).
    """

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        if device_ids is None or async_op:
            return original(group, async_op, device_ids)
        asked = torch.empty(1, dtype=torch.uint8, device="cuda")
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        del asked
        return None

    return barrier


def _reducing(call: Callable[..., Any], recorder: RankRecorder) -> Callable[..., Any]:
    """Return a method of ``ProcessGroup`` that tells the recorder how it reduces, which the operator does not show."""

    def reduce(group: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        recorder.reduction = exchanged.reduction_of((*rest, *named.values()))
        return call(group, tensors, *rest, **named)

    return reduce


def _resizing(recorder: RankRecorder) -> Callable[..., Any]:
    """Return ``UntypedStorage.resize_`` that tells the recorder."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, size)
        if before != size and storage.device.type == "meta":
            recorder.resized(storage, before, int(size))
        return result

    return resize_


def _install_fsdp1(patch: Callable[[Any, str, Any], None], recorder: RankRecorder) -> None:
    """FSDP1 records streams with every mode off, in C++, which does not know the simulated ones."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    # The storage of a meta tensor has no address; its size says whether it has memory.
    patch(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0)

    # The group of all ranks that was there when the module was imported: that of another simulation.
    ranks = inspect.signature(ShardedGradScaler).parameters["process_group"].default
    patch(ShardedGradScaler, "__init__", _with_group(ShardedGradScaler.__init__, instead_of=ranks))

    for module in (_common_utils, _flat_param, _runtime_utils):
        if hasattr(module, "_no_dispatch_record_stream"):
            patch(module, "_no_dispatch_record_stream", recorder.use_on_stream)


def _install_fsdp2(patch: Callable[[Any, str, Any], None], torch_version: tuple[int, int]) -> None:
    """Releases before 2.13 do not refuse weights that several groups share; each group then has its own copy."""
    patch(_fsdp_param, "_chunk_with_empty", _Chunks)
    if torch_version < _REFUSES_SHARED and hasattr(FSDPState, "_validate_no_duplicate_params"):
        patch(FSDPState, "_validate_no_duplicate_params", lambda state: None)


class _Chunks:
    """Chunks of a tensor for all ranks, made when they are asked for: FSDP2 asks for two, and 1,024 views take time.

    Those that ``torch.chunk`` does not return are empty (``_chunk_with_empty`` in _fsdp_common.py, torch 2.9-2.13).
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, rank: int) -> torch.Tensor:
        start = rank * self._size
        left = self._tensor.size(self._dim) - start
        if rank and left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, left))


def _with_early_states(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return Adagrad's ``_init_group`` that refuses parameters without a state, as older versions fail with."""

    def with_early_states(optimizer: Any, group: dict[str, Any], *args: Any) -> Any:
        if any(each.grad is not None and "sum" not in optimizer.state[each] for each in group["params"]):
            raise WorkloadError(
                "train.optim: Adagrad makes its states when it is made, before FSDP2 shards the weights, so that its "
                "first step raises KeyError: 'sum' before PyTorch 2.13: use another optimizer",
                key="train.optim",
            )
        return make(optimizer, group, *args)

    return with_early_states


def _install_pipelines(
    patch: Callable[[Any, str, Any], None], recorder: RankRecorder, torch_version: tuple[int, int]
) -> None:
    """Stages know their shapes; since torch 2.13 they ask each other by a message, outside of a batch, whether all do.

    Messages that are sent and received at once share a call of NCCL (``batch_isend_irecv``).
    """
    from torch.distributed.pipelining import PipelineStage, schedules

    batched = _batching(dist.batch_isend_irecv, recorder)
    patch(dist, "batch_isend_irecv", batched)
    if torch_version < _SINGLE_MESSAGES:
        patch(schedules, "_batch_p2p", lambda messages, desc=None: batched(messages) if messages else [])
    for name in ("_warmup_forward_vote", "_warmup_backward_result"):
        if hasattr(PipelineStage, name):
            vote = getattr(PipelineStage, name) if torch_version >= _SINGLE_MESSAGES else _no_vote
            patch(PipelineStage, name, _agreeing(vote, recorder))


def _with_group(make: Callable[..., None], *, instead_of: Any) -> Callable[..., None]:
    """Return the constructor of a scaler that asks the ranks of today where it would ask those of its import."""

    def with_group(scaler: Any, *args: Any, **kwargs: Any) -> None:
        make(scaler, *args, **kwargs)
        if getattr(scaler, "process_group", None) is instead_of:
            scaler.process_group = dist.group.WORLD

    return with_group


def _batching(send: Callable[..., Any], recorder: RankRecorder) -> Callable[..., Any]:
    """Return ``batch_isend_irecv`` that tells the recorder."""

    def batched(*args: Any, **kwargs: Any) -> Any:
        recorder.batching = True
        try:
            return send(*args, **kwargs)
        finally:
            recorder.batching = False

    return batched


def _no_vote(stage: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Return a tensor for the outcome of a vote that older versions do not hold."""
    with _DISABLED():
        return torch.ones(1, dtype=torch.int32, device="cpu")


def _agreeing(vote: Callable[..., torch.Tensor], recorder: RankRecorder) -> Callable[..., torch.Tensor]:
    """Return a vote that always ends in 1."""

    def agree(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = vote(*args, **kwargs)
        with _DISABLED():
            recorder.values.learn(result, torch.ones(result.shape, dtype=result.dtype))
        return result

    return agree


def _address(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensor = local(args[0])
    if not tensor.is_meta:
        return int(func(tensor))
    storage = tensor.untyped_storage()
    return storage._cdata + tensor.storage_offset() * tensor.itemsize if storage.nbytes() else 0


def _of_local(handler: Handler) -> Handler:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return handler(func, (local(args[0]), *args[1:]), kwargs)

    return handle


def _to(handler: Handler) -> Handler:
    """Move the part of a sharded tensor that this rank holds; a change of dtype alone is PyTorch's, with its graph."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, rest = args[0], args[1:]
        if not isinstance(tensor, DTensor):
            return handler(func, args, kwargs)
        if not _names_a_device(rest, kwargs):
            return func(*args, **kwargs)
        dtype = _dtype_named(rest, kwargs)
        if dtype is not None and dtype != tensor.dtype:
            tensor = func(tensor, dtype)
        part = tensor._local_tensor
        moved = handler(func, (part, *rest), kwargs)
        if moved is part:
            return tensor
        return DTensor(moved, tensor._spec, requires_grad=tensor.requires_grad)

    return handle


def _names_a_device(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether arguments of ``Tensor.to`` say where the tensor goes."""
    named = kwargs.get("device", kwargs.get("other", rest[0] if rest else None))
    return named is not None and not isinstance(named, torch.dtype)


def _dtype_named(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that arguments of ``Tensor.to`` ask for, with a device or as that of another tensor."""
    for named in (*rest, *kwargs.values()):
        if isinstance(named, (torch.dtype, torch.Tensor)):
            return named if isinstance(named, torch.dtype) else named.dtype
    return None
