"""Graphs that were traced on meta tensors, as Inductor gets them on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_GPU = torch.device("cuda", 0)


def put_on_gpu(module: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """Let every value and every device of a graph that stand for the GPU's be of the GPU.

    Args:
        module: The graph, which is changed.
        mode: Fake mode of its values.
    """
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = on_gpu(node.meta["val"], mode)
        node.meta.pop("tensor_meta", None)
        node.args = fx.node.map_aggregate(node.args, _device)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _device)
    module.recompile()
    return module


def on_gpu(value: Any, mode: Any) -> Any:
    """Return fake tensors of the meta device as such of the GPU, everything else unchanged."""
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        with mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_GPU)
            return made.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (list, tuple)):
        return type(value)(on_gpu(each, mode) for each in value)
    return value


def _device(value: Any) -> Any:
    return _GPU if isinstance(value, torch.device) and value.type == "meta" else value
