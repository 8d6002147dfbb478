"""Values that are computed when someone asks for them, and what operations read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

Origin = Literal["choice", "draw"]


class LazyValue:
    """Output of an operation on known values, computed on demand; its value is None where that fails.

    ``from_data`` is true of images, sounds, choices and random fractions, and of what follows from them; ``origins``
    names what is assumed: "choice" of entries of unknown scores, "draw" of random numbers.
    """

    def __init__(
        self,
        run: Callable[[], list[torch.Tensor]],
        index: int,
        shape: torch.Size,
        *,
        from_data: bool = False,
        origins: frozenset[Origin] = frozenset(),
    ) -> None:
        self.from_data, self.origins = from_data, origins
        self._run: Callable[[], list[torch.Tensor]] | None = run
        self._index, self._shape = index, shape
        self._value: torch.Tensor | None = None

    def get(self) -> torch.Tensor | None:
        """Compute and return the value."""
        if self._run is not None:
            results, self._run = self._run(), None
            found = results[self._index] if self._index < len(results) else None
            self._value = found if found is not None and found.shape == self._shape and not found.is_meta else None
        return self._value


def assumed(value: torch.Tensor, origins: frozenset[Origin] = frozenset(), *, from_data: bool = True) -> LazyValue:
    """Return values that count as data or follow from what was assumed."""
    return LazyValue(lambda: [value], 0, value.shape, from_data=from_data, origins=origins)


def computed(value: Any) -> Any:
    """Replace lazy values in arguments by their results."""
    if isinstance(value, LazyValue):
        return value.get()
    if isinstance(value, (list, tuple)):
        return type(value)(computed(v) for v in value)
    return value


def written(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the meta tensors that an operation overwrites."""
    if not func._schema.is_mutable:
        return []
    overwritten = (
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [tensor for value in overwritten for tensor in flat(value) if tensor.is_meta]


def flat(value: Any) -> list[torch.Tensor]:
    """Return all strided tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat(v)]
    return []
