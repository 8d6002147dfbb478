"""Geometry of a reduction in ``at::TensorIterator``: dimensions reordered, merged, split for 32-bit indices.

Dimension 0 is the innermost. Strides are in bytes.

Source: aten/src/ATen/TensorIterator.cpp (``reorder_dimensions``, ``coalesce_dimensions``, ``can_use_32bit_indexing``,
``split``), the same in torch 2.9 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Operand:
    """Strides in bytes of one tensor over the iterator's dimensions; an output's stride is 0 over reduced ones."""

    strides: tuple[int, ...]
    is_output: bool


@dataclass(frozen=True, slots=True)
class ReductionIterator:
    """Dimensions of a reduction; ``operands`` has outputs before the input, whose first element is at ``offset``."""

    shape: tuple[int, ...]
    operands: tuple[Operand, ...]
    offset: int = 0

    @property
    def input(self) -> Operand:
        return self.operands[-1]

    @property
    def elements(self) -> int:
        """Number of inputs over all outputs."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def outputs(self) -> int:
        """Number of results."""
        count = 1
        for size, stride in zip(self.shape, self.operands[0].strides, strict=True):
            if stride != 0 or size == 0:
                count *= size
        return count

    @property
    def reduced_dimensions(self) -> int:
        return sum(stride == 0 for stride in self.operands[0].strides)

    @property
    def fits_32_bits(self) -> bool:
        """Return whether every byte offset fits a signed 32-bit integer."""
        if self.elements > _INT32_MAX:
            return False
        extents = (
            1 + sum((size - 1) * stride for size, stride in zip(self.shape, operand.strides, strict=True))
            for operand in self.operands
        )
        return all(extent <= _INT32_MAX for extent in extents)


@dataclass(frozen=True, slots=True)
class InputGeometry:
    """Shape, strides in elements, first element and item size of a reduction's input."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    offset: int = 0


def reduction_iterator(
    input_: InputGeometry, reduced: Sequence[bool], result_bytes: Sequence[int]
) -> ReductionIterator:
    """Return the iterator that reduces ``input_`` over the marked dimensions into contiguous results."""
    operands = [Operand(_output_strides(input_.shape, reduced, size), True) for size in result_bytes]
    operands.append(Operand(tuple(stride * input_.itemsize for stride in input_.strides), False))
    return _coalesced(_reordered(ReductionIterator(input_.shape, tuple(operands), input_.offset)))


def pieces_of_32_bits(iterator: ReductionIterator) -> list[ReductionIterator]:
    """Return the parts into which an iterator is split until 32 bits index each, in the order of reduction."""
    if iterator.fits_32_bits:
        return [iterator]
    dimension = _widest(iterator)
    size = iterator.shape[dimension]
    halves = (size // 2, size - size // 2)
    return [piece for half in halves for piece in pieces_of_32_bits(_narrowed(iterator, dimension, half))]


def _output_strides(shape: Sequence[int], reduced: Sequence[bool], itemsize: int) -> tuple[int, ...]:
    strides = [0] * len(shape)
    step = itemsize
    for dimension in reversed(range(len(shape))):
        if not reduced[dimension]:
            strides[dimension] = step
            step *= shape[dimension]
    return tuple(strides)


def _comes_after(iterator: ReductionIterator, first: int, second: int) -> int:
    """Return 1 if dimension ``first`` belongs outside ``second``, -1 if inside, 0 if no operand decides."""
    for operand in iterator.operands:
        one, other = operand.strides[first], operand.strides[second]
        if operand.is_output and (one == 0) != (other == 0):
            return 1 if other == 0 else -1
        if one == 0 or other == 0:
            continue
        if one != other:
            return -1 if one < other else 1
        if iterator.shape[first] > iterator.shape[second]:
            return 1
    return 0


def _reordered(iterator: ReductionIterator) -> ReductionIterator:
    order = list(reversed(range(len(iterator.shape))))
    for start in range(1, len(order)):
        moving = start
        for place in reversed(range(start)):
            comparison = _comes_after(iterator, order[place], order[moving])
            if comparison > 0:
                order[place], order[moving] = order[moving], order[place]
                moving = place
            elif comparison < 0:
                break
    return ReductionIterator(
        tuple(iterator.shape[i] for i in order),
        tuple(Operand(tuple(operand.strides[i] for i in order), operand.is_output) for operand in iterator.operands),
        iterator.offset,
    )


def _coalesced(iterator: ReductionIterator) -> ReductionIterator:
    """Merge neighbouring dimensions where every operand steps through them evenly."""
    if len(iterator.shape) <= 1:
        return iterator
    shape = list(iterator.shape)
    strides = [list(operand.strides) for operand in iterator.operands]
    last = 0
    for dimension in range(1, len(shape)):
        even = all(shape[last] * stride[last] == stride[dimension] for stride in strides)
        if shape[last] == 1 or shape[dimension] == 1 or even:
            if shape[last] == 1:
                for stride in strides:
                    stride[last] = stride[dimension]
            shape[last] *= shape[dimension]
        else:
            last += 1
            shape[last] = shape[dimension]
            for stride in strides:
                stride[last] = stride[dimension]
    kept = last + 1
    operands = tuple(Operand(tuple(s[:kept]), o.is_output) for s, o in zip(strides, iterator.operands, strict=True))
    return ReductionIterator(tuple(shape[:kept]), operands, iterator.offset)


def _widest(iterator: ReductionIterator) -> int:
    """Return the dimension over which some operand spans the most bytes; the outermost of equals."""
    extents = [
        max((size - 1) * abs(operand.strides[dimension]) for operand in iterator.operands)
        for dimension, size in enumerate(iterator.shape)
    ]
    return max(reversed(range(len(extents))), key=lambda dimension: extents[dimension])


def _narrowed(iterator: ReductionIterator, dimension: int, size: int) -> ReductionIterator:
    shape = tuple(size if index == dimension else old for index, old in enumerate(iterator.shape))
    return ReductionIterator(shape, iterator.operands, iterator.offset)
