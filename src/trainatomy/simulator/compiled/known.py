"""What a graph of Dynamo returns of known values: masks, labels and positions, which Python between two graphs reads.

Kernels compute nothing here, so that the part of the graph that such a result follows from runs on the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.simulator.compiled.tracing import without_function_modes
from trainatomy.simulator.values import CPU, Values

_GPU = re.compile(r"(?:cuda|meta)(?::\d+)?")


class KnownResults:
    """Whole numbers and bools among the results of a graph that follow from such inputs alone.

    Args:
        graph: A graph of Dynamo, whose nodes have example values.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        places = {node: place for place, node in enumerate(node for node in nodes if node.op == "placeholder")}
        results = nodes[-1].args[0]
        assert isinstance(results, (list, tuple))
        self._functions: list[tuple[int, list[int], Callable[..., Any]]] = []
        for place, result in enumerate(results):
            example = result.meta.get("example_value") if isinstance(result, fx.Node) else None
            if isinstance(example, torch.Tensor) and result not in places and _is_whole(result):
                needed = _ancestors(result)
                read = [node for node in nodes if node in needed and node in places]
                if all(map(_is_whole, read)) and all(map(_is_functional, needed)):
                    function = _on_host(graph, [node for node in nodes if node in needed], result)
                    self._functions.append((place, [places[node] for node in read], function))

    def follow(self, values: Values, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Let results of a call of the graph have the values that follow from those of its inputs."""
        with without_function_modes():  # which say that meta tensors are on the GPU
            for place, read, function in self._functions:
                values.follow_function(function, [inputs[each] for each in read], results[place])


def _is_whole(node: fx.Node) -> bool:
    """Return whether a node is a number, or a tensor of whole numbers or bools."""
    example = node.meta.get("example_value")
    if isinstance(example, torch.Tensor):
        return not (example.is_floating_point() or example.is_complex())
    return isinstance(example, (int, torch.SymInt))


def _is_functional(node: fx.Node) -> bool:
    """Return whether the graph computes a node from inputs, and overwrites it nowhere."""
    example = node.meta.get("example_value")
    overwritten = isinstance(example, torch.Tensor) and (example.is_inference() or example._version > 0)
    return node.op != "get_attr" and not overwritten


def _ancestors(result: fx.Node) -> set[fx.Node]:
    """Return what a node follows from, and the node itself."""
    needed, waiting = set[fx.Node](), [result]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _on_host(graph: fx.GraphModule, nodes: Sequence[fx.Node], result: fx.Node) -> Callable[..., Any]:
    """Return a part of a graph as a function of its placeholders, whose tensors are on the host."""
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        copy = copies[node] = part.node_copy(node, copies.__getitem__)
        copy.args, copy.kwargs = fx.node.map_aggregate((copy.args, copy.kwargs), _cpu)
    part.output(copies[result])
    forward = fx.GraphModule(graph, part).forward

    def run(*arguments: Any) -> Any:
        with without_function_modes(), _disable_current_modes():
            return forward(*arguments)

    return run


def _cpu(value: Any) -> Any:
    """Return a device as the CPU, everything else unchanged."""
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and _GPU.fullmatch(value))
    return CPU if is_device else value
