"""Operations that are one kernel on a GPU and several operators here, recorded as the one.

A kernel that has no implementation for meta tensors is simulated by a few operators that allocate the same memory.
``one_operation`` around them names the kernel that they stand for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Writer(Protocol):
    """The recipient of operations: ``simulator.operations.OperationWriter``."""

    def enter(self, name: str) -> int: ...
    def leave(self) -> None: ...
    def write_one(
        self,
        name: str,
        inputs: tuple[torch.Tensor | None, ...],
        outputs: list[torch.Tensor | None],
        numbers: dict[str, Any],
        written: tuple[int, ...],
        event: int,
    ) -> None: ...


_writers: list[Writer] = []


@contextlib.contextmanager
def record_operations_with(writer: Writer) -> Iterator[None]:
    """Send operations to ``writer`` while the context is open."""
    _writers.append(writer)
    try:
        yield
    finally:
        _writers.pop()


@contextlib.contextmanager
def one_operation(
    name: str, *inputs: torch.Tensor | None, written: tuple[int, ...] = (), **numbers: Any
) -> Iterator[list[torch.Tensor | None]]:
    """Record the operators inside as the one operation ``name``.

    Args:
        name: the operator (``aten::_cudnn_rnn``).
        inputs: its tensors.
        written: positions of the inputs that it writes to.
        numbers: its other arguments.

    Yields:
        A list to put its results into.
    """
    results: list[torch.Tensor | None] = []
    if not _writers:
        yield results
        return
    writer = _writers[-1]
    event = writer.enter(name)
    try:
        yield results
    finally:
        writer.leave()
    writer.write_one(name, inputs, results, numbers, written, event)
