"""Sharding propagation, by which DTensor learns how the results of an operator are sharded: unseen, and faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.simulator.parallel.recorder import RankRecorder

_SHAPES, _SHARDING = "_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"
_ON_LISTS = ("aten::_foreach_", "aten::_fused_")


def install(patch: Callable[[Any, str, Any], None], recorder: RankRecorder) -> None:
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
            with _disable_current_modes(), torch._C.DisableTorchFunction():
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
