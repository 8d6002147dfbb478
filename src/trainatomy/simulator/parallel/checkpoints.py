"""Sharded checkpoints of one simulated rank (``torch.distributed.checkpoint``): what the other ranks would answer.

Ranks send their plans to rank 0, which leaves out what several ranks hold, and sends each its part back.  Here the
plans of the others are made from this rank's own: the same entries, with the shards at other places.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import utils as of_checkpoints
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, WriteItem, WriteItemType
from torch.distributed.fsdp import _optim_utils

from trainatomy.simulator.recorder import Recorder


def install(patch: Callable[[Any, str, Any], None], recorder: Recorder) -> None:
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
