"""Collectives as operations: kind, size, and the ranks that take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that was called.

    Attributes:
        kind: A key of ``_KINDS``.
        bytes: Size of the whole message, as nccl-tests counts it: output of an all-gather, input of a reduce-scatter.
        ranks: Ranks of the group, in order.
        group: Name of the group: several groups may have the same ranks.
        inputs: Tensors that this rank sends.
        outputs: Tensors that it receives.
        is_async: True if the caller goes on before the collective is over, and waits for it later.
        members: All ranks of the group; of a message, more than the two in ``ranks``.
        peer: The other rank of a message; None for a collective of the group.
        reduction: Name of the operation that a functional collective reduces with, else empty.
    """

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    group: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    is_async: bool
    members: tuple[int, ...]
    peer: int | None
    reduction: str


def collective_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Collective:
    """Describe a call of an operator in one of ``NAMESPACES``."""
    schema = func._schema
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    sent = [tensor for name in named if name.startswith(("input", "tensor")) for tensor in tensors_in(named[name])]
    received = [tensor for name in named if name.startswith("output") for tensor in tensors_in(named[name])]
    received = received or tensors_in(result) or sent
    sent = sent or received
    group = _group(named)
    ranks = tuple(dist.get_process_group_ranks(group))
    peer = _peer(ranks, named)
    return Collective(
        KINDS.get(schema.name.rpartition("::")[2], ""),
        max(sum(tensor.nbytes for tensor in sent), sum(tensor.nbytes for tensor in received)),
        ranks if peer is None else tuple(sorted({dist.get_rank(), peer})),
        str(group.group_name),
        tuple(sent),
        tuple(received),
        bool(named.get("async_op", named.get("asyncOp", True))),
        ranks,
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
