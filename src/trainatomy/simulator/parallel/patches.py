"""Places where PyTorch's parallel code asks for what one simulated rank does not have, each with its reason.

Sharding propagation, by which DTensor learns how the results of an operator are sharded: unseen, and faster.

Sharded checkpoints of one simulated rank (``torch.distributed.checkpoint``): what the other ranks would answer.

Ranks send their plans to rank 0, which leaves out what several ranks hold, and sends each its part back.  Here the
plans of the others are made from this rank's own: the same entries, with the shards at other places.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import utils as of_checkpoints
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, WriteItem, WriteItemType
from torch.distributed.fsdp import _common_utils, _flat_param, _optim_utils, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, _dispatch, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.errors import WorkloadError
from trainatomy.simulator.autograd import Handler, assignments
from trainatomy.simulator.parallel import recorder as exchanged
from trainatomy.simulator.parallel.recorder import RankRecorder, local
from trainatomy.simulator.recorder import Recorder
from trainatomy.training.stored_weights import is_packed


def install_checkpoints(patch: Callable[[Any, str, Any], None], recorder: Recorder) -> None:
    """Let a sharded checkpoint be planned, written and read by one rank."""
    wrapper = of_checkpoints._DistWrapper
    patch(wrapper, "reduce_scatter", _reduce_scatter)
    patch(wrapper, "all_reduce", _all_reduce)
    # Its places of other ranks' shards are not those of PyTorch.  The value of a valid plan depends on the release.
    valid = default_planner._validate_global_plan([], Metadata(state_dict_metadata={}))
    patch(default_planner, "_validate_global_plan", lambda plan, metadata: valid)
    patch(FileSystemReader, "read_data", _read_data(FileSystemReader.read_data, recorder))
    patch(_optim_utils, "_map_param_key_to_optim_keys", _all_keys(_optim_utils._map_param_key_to_optim_keys))
    patch(_optim_utils, "_allgather_state_info", _states_of_all(_optim_utils._allgather_state_info))


def _reduce_scatter(wrapper: Any, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], Any]) -> Any:
    """Return this rank's part of what all ranks decide together."""
    own = map_fun()
    _gather(own, wrapper)
    found = reduce_fun([_of_rank(own, rank, wrapper.rank) for rank in range(wrapper.get_world_size())])[wrapper.rank]
    _scatter(found, wrapper)
    return found


def _all_reduce(wrapper: Any, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], Any]) -> Any:
    """Return what rank 0 makes of the results of all ranks: of this one's, as nobody reads the others'.

    Rank 0 writes the metadata that all ranks read when they load; where another rank is simulated, that one does.
    """
    own = map_fun()
    _gather(own, wrapper)
    found = reduce_fun([own])
    return found if wrapper.is_coordinator else None


def _read_data(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return what loads this rank's parts of a checkpoint, one after the other, from host memory without data.

    Values that are no tensors, and that other ranks wrote, are those that this rank has already.
    Source: torch/distributed/checkpoint/filesystem.py (``FileSystemReader.read_data``), torch 2.9-2.13.
    """

    def read_data(reader: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
        kept = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                kept += [item] if item.storage_index in reader.storage_data else []
            else:
                target = planner.resolve_tensor(item).detach()
                read = torch.empty(item.lengths, dtype=target.dtype, pin_memory=True)  # any in host memory would do
                recorder.largest_read = max(recorder.largest_read, int(read.nbytes))
                target.copy_(read)
                planner.commit_tensor(item, target)
        return original(reader, replace(plan, items=kept), planner)

    return read_data


def _gather(value: Any, wrapper: Any) -> None:
    """Send a value to rank 0 as ``gather_object`` does: NCCL gathers its pickled bytes from the GPUs."""
    size, ranks = len(pickle.dumps(value)), wrapper.get_world_size()
    sent = torch.empty(size, dtype=torch.uint8, device="cuda")
    received = torch.empty(size * ranks, dtype=torch.uint8, device="cuda") if wrapper.is_coordinator else None
    parts = None if received is None else list(received.split(size))
    dist.gather(sent, parts, dst=wrapper.global_coordinator_rank, group=wrapper.group)


def _scatter(value: Any, wrapper: Any) -> None:
    """Receive a value from rank 0 as ``scatter_object_list`` does."""
    size, ranks = len(pickle.dumps(value)), wrapper.get_world_size()
    received = torch.empty(size, dtype=torch.uint8, device="cuda")
    parts = None
    if wrapper.is_coordinator:
        parts = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    dist.scatter(received, parts, src=wrapper.global_coordinator_rank, group=wrapper.group)


def _of_rank(plan: Any, rank: int, own_rank: int) -> Any:
    """Return the plan of a rank, made from the plan of this one."""
    if rank == own_rank or not isinstance(plan, SavePlan):
        return plan
    return replace(plan, items=[_item_of_rank(item, rank, own_rank) for item in plan.items])


def _item_of_rank(item: WriteItem, rank: int, own_rank: int) -> WriteItem:
    """Return an entry of another rank's plan: a shard has another place, unless the rank is a copy of this one."""
    if item.type != WriteItemType.SHARD or item.tensor_data is None:
        return item
    whole, part = math.prod(item.tensor_data.size), math.prod(item.tensor_data.chunk.sizes)
    shards = -(-whole // part) if part else rank + own_rank + 1
    if rank % shards == own_rank % shards:
        return item
    elsewhere = torch.Size([-1 - rank % shards] * len(item.tensor_data.size))
    return replace(item, index=replace(item.index, offset=elsewhere, index=None))


def _all_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return FSDP1's function that names the parameters with states: those of other ranks' shards have some, too."""

    def map_keys(
        states: Any, group: Any, parameters: Any, names: Any, units: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        keys, own = original(states, group, parameters, names, units, *arguments, **keywords)
        if states["state"]:
            trained = [tuple(names[one]) for one in parameters.values() if one.requires_grad]
            found = {_optim_utils._OptimStateKey(each, is_fsdp_managed=each[0] in units) for each in trained}
            keys = sorted(found | set(keys))
        return keys, own

    return map_keys


def _states_of_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return FSDP1's function that learns which states other ranks have: the kinds that this one has."""

    def gathered(unit: Any, states: Any) -> Any:
        of_ranks = original(unit, states)
        rank = unit.rank
        own = of_ranks[rank]
        known = next((info for info in own.values() if info.tensors), None)
        theirs = {name: info if info.tensors or known is None else known for name, info in own.items()}
        return [own if each == rank else theirs for each in range(len(of_ranks))]

    return gathered


_SHAPES, _SHARDING = "_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"
_ON_LISTS = ("aten::_foreach_", "aten::_fused_")
_DISABLED_FUNCTIONS = torch._C.DisableTorchFunction


def install_sharding(patch: Callable[[Any, str, Any], None], recorder: RankRecorder) -> None:
    """Patch DTensor's sharding propagation."""
    for name, faster in ((_SHAPES, None), (_SHARDING, _by_kind)):
        if (function := getattr(ShardingPropagator, name, None)) is not None:
            unseen = _unseen(function, recorder)
            patch(ShardingPropagator, name, unseen if faster is None else faster(unseen))


def _unseen(function: Callable[..., Any], recorder: RankRecorder) -> Callable[..., Any]:
    """Run a function of the propagation outside of the simulation: it makes fake tensors to learn shapes.

    Fake tensors of a GPU cannot be filled with random numbers by a CPU build; the result looks as the argument does.
    """

    def propagate(*args: Any, **kwargs: Any) -> Any:
        schema = args[1] if len(args) > 1 else None
        if function.__name__ == _SHAPES and isinstance(schema, OpSchema) and _draws(schema.op):
            return schema.args_spec[0].tensor_meta
        before, recorder.paused = recorder.paused, True
        try:
            with _disable_current_modes(), _DISABLED_FUNCTIONS():
                return function(*args, **kwargs)
        finally:
            recorder.paused = before

    return propagate


def _by_kind(propagate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the propagation of an operator, which for lists of tensors looks at one item of each kind.

    Operators on lists (``_foreach``, fused optimizers) treat each item alone.  A model has hundreds of parameters of a
    dozen shapes, and PyTorch takes a millisecond for each of them (torch 2.13).
    """

    def propagate_kinds(self: ShardingPropagator, schema: OpSchema) -> Any:
        given: Sequence[Any] = schema.args_schema
        lists = {place: value for place, value in enumerate(given) if isinstance(value, (list, tuple))}
        lengths = {len(value) for value in lists.values() if value}
        if not schema.op._schema.name.startswith(_ON_LISTS) or len(lengths) != 1:
            return propagate(self, schema)
        items = list(zip(*(map(_kind, value) for value in lists.values() if value), strict=True))
        first = {kind: place for place, kind in reversed(list(enumerate(items)))}
        if len(first) == len(items):
            return propagate(self, schema)
        chosen = sorted(first.values())
        args = tuple(
            type(value)(value[place] for place in chosen) if value and position in lists else value
            for position, value in enumerate(given)
        )
        found = propagate(self, OpSchema(schema.op, args, schema.kwargs_schema, schema.schema_info))
        specs = found.output_spec
        if found.needs_redistribute or not (specs is None or isinstance(specs, (list, tuple))):
            return propagate(self, schema)
        if specs is not None:
            of_kind = {items[place]: spec for place, spec in zip(chosen, specs, strict=True)}
            found.output_spec = type(specs)(copy(of_kind[kind]) for kind in items)
        return found

    return propagate_kinds


def _kind(item: Any) -> Any:
    """Return what tells an item of a list from those of other kinds."""
    if not isinstance(item, DTensorSpec):
        return type(item), item
    return item, item.use_strided_shard_as_shard_order, item.tensor_meta


def _draws(operator: Any) -> bool:
    """Return whether an operator makes random numbers in the form of its first argument."""
    name = operator._schema.name
    return torch.Tag.nondeterministic_seeded in operator.tags and name.endswith(("_", "_like"))


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
    install_sharding(patch, recorder)
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
    install_checkpoints(patch, recorder)


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
