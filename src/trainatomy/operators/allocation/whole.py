"""Operations that are one on a GPU and several here: written to the step's operations as the one.

A kernel that has no implementation for tensors without data is simulated by a few operations that allocate what it
does.  Around them ``one_operation`` says what they stand for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Writer(Protocol):
    """Who is told: ``world.operations.OperationWriter``."""

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
def told_to(writer: Writer) -> Iterator[None]:
    """While this is open, operations are told to ``writer``."""
    _writers.append(writer)
    try:
        yield
    finally:
        _writers.pop()


@contextlib.contextmanager
def one_operation(
    name: str, *inputs: torch.Tensor | None, written: tuple[int, ...] = (), **numbers: Any
) -> Iterator[list[torch.Tensor | None]]:
    """What happens inside is the operation ``name`` of ``inputs`` (with other arguments ``numbers``); put its results
    into the list that it gives. ``written``: positions of inputs that it writes to."""
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
