"""Workspaces that a library does without when memory is short.

PyTorch finds a plan for cuDNN's convolutions by trying: it catches the ``OutOfMemoryError`` of a plan's workspace and
tries the next plan.  The plan that ran is kept for all equal calls.  When its workspace fails later, PyTorch asks for
plans again, and the first of them fails a second time before the next is tried.  Each failure has made the allocator
release its cache and counts as a retry.  The next plan is assumed to need no workspace (see
``trainatomy.operators.allocation.convolution``).

With ``cudnn.benchmark`` the first call leaves out plans that need more than the driver has left and more than any
cached block, takes a buffer for the largest workspace of the others, half of it and so on where that fails, and times
the plans that fit into the buffer (``generate_and_filter_plans``).

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp (``run_single_conv``, ``try_configs``, ``BenchmarkCache``), the same in
copies of 2023 and of late 2025; Conv_v7.cpp (``AlgoIterator::try_all``) does the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.allocator.outofmemory import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainatomy.results.trace import PlansTried


class Choices:
    """Allocates optional workspaces as their library would.

    Attributes:
        of: Number of the decision that each allocation belongs to.
        skipped: Allocations that the library did without.
    """

    def __init__(
        self,
        of: Mapping[int, int],
        malloc: Callable[[int, int], int],
        trials: Mapping[int, PlansTried],
        largest_possible: Callable[[], float],
    ) -> None:
        self.of = of
        self.skipped: list[int] = []
        self._malloc = malloc
        self._trials = trials
        self._largest_possible = largest_possible
        self._instead: dict[int, int] = {}
        """Workspace of the plan that is kept, of decisions whose expected plan did not fit into the trial's buffer."""
        self._kept: set[int] = set()
        self._without: set[int] = set()

    def take(self, allocation: int, requested: int, stream: int) -> int:
        """Allocate a workspace and return its handle, 0 if the library does without."""
        choice = self.of[allocation]
        if allocation in self._trials:
            return self._try(choice, self._trials[allocation].workspaces, stream)
        requested = min(requested, self._instead.get(choice, requested))
        if choice not in self._without:
            for _ in range(2 if choice in self._kept else 1):
                try:
                    handle = self._malloc(requested, stream)
                except OutOfMemory:
                    continue
                self._kept.add(choice)
                return handle
            self._without.add(choice)
        self.skipped.append(allocation)
        return 0

    def _try(self, choice: int, workspaces: tuple[int, ...], stream: int) -> int:
        """Allocate the buffer of a trial and return its handle, 0 if all plans that fit need none."""
        possible = self._largest_possible()
        size, handle = max((one for one in workspaces if one <= possible), default=0), 0
        while size and not handle:
            try:
                handle = self._malloc(size, stream)
            except OutOfMemory:
                size //= 2
        if workspaces[0] > size:
            self._instead[choice] = next((one for one in workspaces if one <= size), 0)
        return handle
