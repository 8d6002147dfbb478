"""Workspaces that a library does without where memory lacks, and what it does then.

cuDNN's convolutions are given a plan by trying: PyTorch catches the ``OutOfMemoryError`` of a plan's workspace and
tries the next plan.  The plan that ran is kept for all calls that are alike.  When its workspace fails later, plans are
asked for anew, and the first of them fails a second time before the next is tried.  Each failure has made the
allocator give its cache back, and counts as a retry.  What the next plan takes is assumed to be nothing (see
``trainatomy.operators.allocation.convolution``).

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp (``run_single_conv``, ``try_configs``, ``BenchmarkCache``), the same in
copies of 2023 and of late 2025; Conv_v7.cpp (``AlgoIterator::try_all``) goes about it alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.allocator.outofmemory import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Choices:
    """Takes workspaces through ``malloc`` as their library would; ``of``: the decision that each allocation belongs to.

    ``forgone``: allocations that were done without.
    """

    def __init__(self, of: Mapping[int, int], malloc: Callable[[int, int], int]) -> None:
        self.of = of
        self.forgone: list[int] = []
        self._malloc = malloc
        self._kept: set[int] = set()
        self._without: set[int] = set()

    def take(self, allocation: int, requested: int, stream: int) -> int:
        """The handle of the workspace; 0 where the library does without."""
        choice = self.of[allocation]
        if choice not in self._without:
            for _ in range(2 if choice in self._kept else 1):
                try:
                    handle = self._malloc(requested, stream)
                except OutOfMemory:
                    continue
                self._kept.add(choice)
                return handle
            self._without.add(choice)
        self.forgone.append(allocation)
        return 0
