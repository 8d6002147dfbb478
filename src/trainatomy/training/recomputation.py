"""Tells what backward runs again: checkpointed functions, and modules that other code calls there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.utils import checkpoint

_FUNCTION = -1
"""In place of a depth: a checkpointed function runs again, whichever modules are being called."""


class Recomputation:
    """Stretches of backward in which a forward runs again.

    Functions that ``torch.utils.checkpoint`` runs again are followed there, since hooks of modules may not see them:
    transformers 5.24 checkpoints the ``forward`` of a layer, earlier releases its ``__call__``.  Checkpoints of other
    libraries are seen by the modules that they call in backward.  The engine's task tells backward from other code,
    and one backward from another: gradients that a recomputed function computes itself are no recomputation.

    Args:
        report: Called with True when a stretch begins, with False when it ends.
    """

    def __init__(self, report: Callable[[bool], None]) -> None:
        self._report = report
        self._running: list[tuple[int, int]] = []

    @property
    def runs(self) -> bool:
        """Whether a forward runs again, in the backward that runs."""
        return bool(self._running) and self._running[-1][0] == torch._C._current_graph_task_id()

    def module_called(self, depth: int) -> None:
        """Note a call of a module inside of ``depth`` others."""
        if torch._C._current_graph_task_id() != -1 and not self.runs:
            self._begin(depth)

    def module_returned(self, depth: int) -> None:
        """Note the end of a call of a module inside of ``depth`` others."""
        if self.runs and self._running[-1][1] == depth:
            self._end()

    @contextlib.contextmanager
    def following(
        self, checkpointed: Callable[[], str], again: Callable[[str], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Follow checkpointed functions in the block.

        Args:
            checkpointed: Called when a function is checkpointed, in forward; returns the module at work.
            again: Called with that module when the function runs again; it runs in the context that this returns.
        """
        frame: Any = checkpoint._CheckpointFrame
        function: Any = checkpoint.CheckpointFunction
        make, forward = frame.__init__, function.forward

        def followed(run: Callable[..., Any]) -> Callable[..., Any]:
            module = checkpointed()

            def run_followed(*args: Any, **kwargs: Any) -> Any:
                if torch._C._current_graph_task_id() == -1:
                    return run(*args, **kwargs)
                self._begin(_FUNCTION)
                try:
                    with again(module):
                        return run(*args, **kwargs)
                finally:
                    self._end()

            return run_followed

        def make_followed(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            make(self, followed(recompute_fn), *args, **kwargs)

        def forward_followed(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, followed(run_function), *args)

        with (
            mock.patch.object(frame, "__init__", make_followed),
            mock.patch.object(function, "forward", staticmethod(forward_followed)),
        ):
            yield

    def _begin(self, depth: int) -> None:
        if not self._running:
            self._report(True)
        self._running.append((torch._C._current_graph_task_id(), depth))

    def _end(self) -> None:
        self._running.pop()
        if not self._running:
            self._report(False)
