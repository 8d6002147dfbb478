"""Memory with which Inductor tries the settings of a kernel before the kernel runs for the first time.

A kernel that Inductor writes has several settings (how many numbers a block of threads computes, how many warps), which
are timed on its first call.  Between two runs a buffer as large as the L2 cache is overwritten, so that each of them
reads from memory.  It is released soon, but its segment stays, and later allocations are made in it.

Source: torch 2.11-2.13, torch/_inductor/runtime/benchmarking.py (``InductorBenchmarker.benchmark_gpu``) and
triton_heuristics.py (``CachingAutotuner.run``).  The kernels of attention itself have one setting, and are not tried.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainatomy.operators.allocation.whole import one_operation

OPERATION = "inductor::tuning"
_COMPILED_SIZES = 2
"""Sizes that a graph is compiled for: with the second, its sizes become variables (``automatic_dynamic_shapes``)."""


class Tuning:
    """First calls of the compiled kernels of one process.

    Attributes:
        buffer_bytes: Size of the L2 cache; None: not known, and nothing is allocated.
    """

    def __init__(self, buffer_bytes: int | None) -> None:
        self.buffer_bytes = buffer_bytes
        self._sizes: dict[str, set[object]] = {}

    def call(self, kernel: str, *results: Tensor) -> None:
        """Allocate and release the buffer if ``kernel`` was not compiled for results of these sizes yet."""
        if self.buffer_bytes is None:
            return
        sizes = self._sizes.setdefault(kernel, set())
        found = tuple((each.shape, each.dtype) for each in results)
        if found in sizes or len(sizes) == _COMPILED_SIZES:
            return
        sizes.add(found)
        with one_operation(OPERATION, bytes=0):
            torch.empty(self.buffer_bytes // 4, dtype=torch.int32, device="cuda")
