"""Order of the backward pass where its own operations were recorded: gradient penalties, meta-learning, Hessians.

The autograd engine runs the node with the highest sequence number first.  Each thread counts for itself.  On a GPU the
backward pass runs in a thread of the GPU, so the nodes that ``create_graph=True`` makes have numbers of that thread,
which are often lower than those of the forward pass, and run after it.  On meta tensors everything runs in one thread,
so that they would run first, and other gradients would wait in memory.

Source: torch/csrc/autograd/engine.cpp (``CompareNodeTaskTime``), aten/src/ATen/SequenceNumber.cpp (``thread_local``).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from typing import Any
from unittest import mock

import torch

_COUNTED_ANEW = 1 << 62
"""Added to the numbers of nodes that are counted as on a GPU; gradients of parameters have 2^64 - 1."""


class BackwardOrder:
    """Sequence numbers as threads of their own would give them."""

    def __init__(self) -> None:
        self._first = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._made = [0]  # nodes of the GPU's thread before each of its passes
        self._depth = 0
        self._keeps_nodes = False

    def install(self, stack: contextlib.ExitStack) -> None:
        """Count nodes by threads from now on, from 0 as in a process that begins; ``stack`` undoes it."""
        self._first = _next_number()
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", self._run))

    def _run(
        self, outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, *arguments: Any, **keywords: Any
    ) -> Any:
        """Run the engine: a call from inside another backward pass stays in the GPU's thread."""
        if self._depth == 0 and self._keeps_nodes:
            self._count_anew(outputs)
        self._keeps_nodes = self._keeps_nodes or create_graph
        start = _next_number()
        self._depth += 1
        try:
            return _engine(outputs, gradients, retain_graph, create_graph, *arguments, **keywords)
        finally:
            self._depth -= 1
            if self._depth == 0 and (made := _next_number() - start):
                self._starts.append(start)
                self._ends.append(start + made)
                self._made.append(self._made[-1] + made)

    def _count_anew(self, outputs: Any) -> None:
        """Give all nodes below ``outputs`` the numbers that they have on a GPU."""
        edge = torch.autograd.graph.GradientEdge
        with torch._C.DisableTorchFunction():
            waiting = [one.node if isinstance(one, edge) else one.grad_fn for one in outputs]
        while waiting:
            node: Any = waiting.pop()
            if node is None or node._sequence_nr() >= _COUNTED_ANEW:
                continue
            node._set_sequence_nr(_COUNTED_ANEW + self._on_gpu(node._sequence_nr()))
            waiting += [following for following, _ in node.next_functions]

    def _on_gpu(self, number: int) -> int:
        """Return the number that a node has in its own thread."""
        passes = bisect_right(self._starts, number)
        if passes and number < self._ends[passes - 1]:
            return self._made[passes - 1] + number - self._starts[passes - 1]
        return max(0, number - self._first - self._made[passes])


_engine = torch.autograd.graph._engine_run_backward


def _next_number() -> int:
    found: int = torch._C._autograd._get_sequence_nr()
    return found
