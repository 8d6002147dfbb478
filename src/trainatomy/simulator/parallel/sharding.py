"""Sharding propagation, by which DTensor learns how the results of an operator are sharded: unseen, and faster."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.simulator.parallel.recorder import RankRecorder

_SHAPES, _SHARDING = "_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"
_FLAG = "_propagate_use_strided_shard_flag"
_DISABLED = torch._C.DisableTorchFunction


def install(patch: Callable[[Any, str, Any], None], recorder: RankRecorder) -> None:
    """Patch DTensor's sharding propagation."""
    for name in (_SHAPES, _SHARDING):
        if hasattr(ShardingPropagator, name):
            patch(ShardingPropagator, name, _unseen(getattr(ShardingPropagator, name), recorder))
    if hasattr(_sharding_prop, _FLAG):
        patch(_sharding_prop, _FLAG, _asking_once(getattr(_sharding_prop, _FLAG)))


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
            with _disable_current_modes(), _DISABLED():
                return function(*args, **kwargs)
        finally:
            recorder.paused = before

    return propagate


def _draws(operator: Any) -> bool:
    """Return whether an operator makes random numbers in the form of its first argument."""
    name = operator._schema.name
    return torch.Tag.nondeterministic_seeded in operator.tags and name.endswith(("_", "_like"))


def _asking_once(propagate_flag: Callable[[Any, Any], None]) -> Callable[[Any, OpSchema], None]:
    """Return ``_propagate_use_strided_shard_flag`` that searches the arguments of an operator once.

    PyTorch calls it for every tensor of a list and searches all of them each time, which takes a sixth of a simulation
    whose optimizer has 300 parameters (torch 2.13).  It looks only for the flags of arguments with strided shards, so
    one argument for each value says as much.
    """
    searched: OpSchema | None = None
    flags = SimpleNamespace(args_spec=())

    def propagate(strategy: Any, schema: OpSchema) -> None:
        nonlocal searched
        if schema is not searched:
            searched = schema
            strided = [spec for spec in schema.args_spec if any(isinstance(p, _StridedShard) for p in spec.placements)]
            flags.args_spec = tuple({spec.use_strided_shard_as_shard_order: spec for spec in strided}.values())
        propagate_flag(strategy, flags)

    return propagate
