"""Values that are computed when someone asks for them, and what operations read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Literal

import torch

Origin = Literal["choice", "draw", "rounded", "bounded"]
_GUESSES = frozenset[Origin](("rounded", "bounded"))


class UnknownValue(Exception):
    """A value that an operation needs, and that could not be computed."""


class LazyValue:
    """Output of an operation on known values, computed on demand; its value is None where that fails.

    Values that follow from each other are computed in the order in which they were made, so that a chain of them may be
    long: each token of a generation follows from the one before.

    Args:
        run: Computes the outputs of the operation.
        index: Which of its outputs this is.
        shape: The shape of this output.
        needs: Values that the operation reads.
        from_data: True for images, sounds, choices and random fractions, and for what follows from them.
        origins: What is assumed: "choice" of entries of unknown scores, "draw" of random numbers; what is "rounded"
            to whole numbers, or kept within bounds ("bounded"), was 0 before.

    Attributes:
        shape: See above.
        number: Its place in the order in which values were made.
    """

    _made = count()

    def __init__(
        self,
        run: Callable[[], list[torch.Tensor]],
        index: int,
        shape: torch.Size,
        *,
        needs: Sequence[LazyValue] = (),
        from_data: bool = False,
        origins: frozenset[Origin] = frozenset(),
    ) -> None:
        self.from_data, self.origins = from_data, origins
        self._run: Callable[[], list[torch.Tensor]] | None = run
        self._index, self.shape, self._needs = index, shape, needs
        self.number = next(self._made)
        self._value: torch.Tensor | None = None

    @property
    def is_guess(self) -> bool:
        """Whether the value says nothing but what agrees with a number that Python reads as 0."""
        return bool(self.origins & _GUESSES)

    def get(self) -> torch.Tensor | None:
        """Compute and return the value."""
        if self._run is not None:
            pending, waiting = dict[int, LazyValue](), [self]
            while waiting:
                value = waiting.pop()
                if value._run is not None and value.number not in pending:
                    pending[value.number] = value
                    waiting += value._needs
            for number in sorted(pending):
                pending[number]._compute()
        return self._value

    def _compute(self) -> None:
        assert self._run is not None
        results, self._run, self._needs = self._run(), None, ()
        found = results[self._index] if self._index < len(results) else None
        self._value = found if found is not None and found.shape == self.shape and not found.is_meta else None


def assumed(value: torch.Tensor, origins: frozenset[Origin] = frozenset(), *, from_data: bool = True) -> LazyValue:
    """Return values that count as data or follow from what was assumed."""
    return LazyValue(lambda: [value], 0, value.shape, from_data=from_data, origins=origins)


def computed(value: Any) -> Any:
    """Replace lazy values in arguments by their results.

    Raises:
        UnknownValue: One of them could not be computed.
    """
    if isinstance(value, LazyValue):
        if (result := value.get()) is None:
            raise UnknownValue
        return result
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
