"""Reductions (sum, mean, norm, max, var, any …): buffer and semaphores of a reduction shared by several blocks.

A block that reduces alone needs no memory of its own. Where each thread would have to add more than 256 values and
there are few results, the input is divided between blocks, which exchange partial results in global memory.

Source: aten/src/ATen/native/cuda/Reduce.cuh (``setReduceConfig``, ``gpu_reduce_kernel``), torch 2.9-2.14. The build for
HIP has blocks as wide as its warps, leaves a thread at least 128 values and shares a result between at least 64 blocks.

Geometry of a reduction in ``at::TensorIterator``: dimensions reordered, merged, split for 32-bit indices.

Dimension 0 is the innermost. Strides are in bytes.

Source: aten/src/ATen/TensorIterator.cpp (``reorder_dimensions``, ``coalesce_dimensions``, ``can_use_32bit_indexing``,
``split``), the same in torch 2.9 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from trainatomy.catalog.gpus import threads_per_multiprocessor
from trainatomy.operators.allocation.plan import (
    Free,
    KernelCall,
    Out,
    Plan,
    Processor,
    Rule,
    Scratch,
    bound,
    ceil_div,
    compute_type,
    dense_bytes,
)

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


_MOST_KEPT = 4096
"""Reductions whose geometry is kept: layers repeat them, and every GPU that an execution serves asks for each."""


@lru_cache(_MOST_KEPT)
def reduction_iterator(
    input_: InputGeometry, reduced: tuple[bool, ...], result_bytes: tuple[int, ...]
) -> ReductionIterator:
    """Return the iterator that reduces ``input_`` over the marked dimensions into contiguous results."""
    operands = [Operand(_output_strides(input_.shape, reduced, size), True) for size in result_bytes]
    operands.append(Operand(tuple(stride * input_.itemsize for stride in input_.strides), False))
    return _coalesced(_reordered(ReductionIterator(input_.shape, tuple(operands), input_.offset)))


@lru_cache(_MOST_KEPT)
def pieces_of_32_bits(iterator: ReductionIterator) -> tuple[ReductionIterator, ...]:
    """Return the parts into which an iterator is split until 32 bits index each, in the order of reduction."""
    if iterator.fits_32_bits:
        return (iterator,)
    dimension = _widest(iterator)
    size = iterator.shape[dimension]
    halves = (size // 2, size - size // 2)
    return tuple(piece for half in halves for piece in pieces_of_32_bits(_narrowed(iterator, dimension, half)))


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


_THREADS = 512
_MIN_VALUES_PER_THREAD = 16
_MIN_VALUES_PER_THREAD_ON_AMD = 128
_MIN_BLOCKS_ON_AMD = 64
_MAX_VALUES_PER_THREAD = 256


@dataclass(frozen=True, slots=True)
class Kernel:
    """An instance of the reduction kernel: bytes of its accumulator and of an input value, values read at once.

    ``keeps_in_output``: a partial result may wait in the output; else a tensor beyond 32 bits needs a buffer for them.
    """

    accumulator_bytes: int
    value_bytes: int
    vector: int = 4
    keeps_in_output: bool = True


def reduction_scratch(
    iterator: ReductionIterator, kernel: Kernel, processor: Processor, out_bytes: int
) -> list[Scratch | Free]:
    """Plan a reduction's scratch in order; all buffers but those of the last part are freed."""
    if iterator.elements == 0:
        return []
    pieces = pieces_of_32_bits(iterator)
    plan: list[Scratch | Free] = []
    if len(pieces) > 1 and not kernel.keeps_in_output and out_bytes < kernel.accumulator_bytes:
        plan.append(Scratch(iterator.outputs * kernel.accumulator_bytes, "partial results beyond 32 bits"))
    for number, piece in enumerate(pieces):
        buffer, semaphores = shared_buffers(piece, kernel, processor)
        if buffer:
            names = f"reduction buffer {number}", f"semaphores {number}"
            plan += [Scratch(buffer, names[0]), Scratch(semaphores, names[1]), Free(names[1]), Free(names[0])]
    return plan


def shared_buffers(iterator: ReductionIterator, kernel: Kernel, processor: Processor) -> tuple[int, int]:
    """Return the bytes of the buffer and of the semaphores; (0, 0) where no result is shared between blocks.

    With n results, c blocks to a result, blocks of w columns that each hold v results: 4·⌈n/(v·w·…)⌉ semaphores, and
    n·c accumulators, times w·v where the columns of a block hold different results (as the source has it).
    """
    sharing = _sharing(iterator, kernel, processor.warp_size)
    blocks = 1 if sharing is None else _blocks_per_result(sharing, processor)
    if sharing is None or blocks <= 1:
        return 0, 0
    return sharing.bytes_per_block * blocks, 4 * sharing.grid


class _Sharing(NamedTuple):
    """How blocks would share results: values for each thread, blocks and their threads, bytes of a block's results."""

    values_per_thread: int
    grid: int
    threads: int
    bytes_per_block: int


@lru_cache(_MOST_KEPT)
def _sharing(iterator: ReductionIterator, kernel: Kernel, warp: int) -> _Sharing | None:
    """Return how blocks would share results of a reduction; None where a thread has too few values for that.

    ``warp``: threads of a warp.
    """
    outputs, inputs = iterator.outputs, iterator.elements // iterator.outputs
    along_input = _reduces_fastest(iterator)
    columns, rows = (inputs, outputs) if along_input else (outputs, inputs)
    per_column = 1
    if _fastest_stride(iterator, along_input) == kernel.value_bytes:
        if along_input and columns >= 128 and iterator.reduced_dimensions == 1:
            columns //= kernel.vector
        elif not along_input:
            per_column = _outputs_at_once(iterator, kernel.value_bytes)
            columns //= per_column
    width, height = _block(columns, rows, _THREADS // per_column, warp)
    step_input, step_output = (width, 1) if along_input else (1, width)
    if ceil_div(inputs, step_input) < min(height * 16, _MAX_VALUES_PER_THREAD):
        return None
    step_input *= height
    grid = ceil_div(outputs // per_column, step_output)
    held = kernel.accumulator_bytes * outputs * (1 if along_input else width * per_column)
    return _Sharing(ceil_div(inputs, step_input), grid, width * height, held)


def _blocks_per_result(sharing: _Sharing, processor: Processor) -> int:
    values, grid = sharing.values_per_thread, sharing.grid
    target = processor.multiprocessors * (threads_per_multiprocessor(processor) // sharing.threads)
    if values < _MAX_VALUES_PER_THREAD or grid > target:
        return 1
    least = _MIN_VALUES_PER_THREAD_ON_AMD if processor.is_amd else _MIN_VALUES_PER_THREAD
    blocks = max(min(ceil_div(target, grid), ceil_div(values, least)), ceil_div(values, _MAX_VALUES_PER_THREAD))
    return max(blocks, _MIN_BLOCKS_ON_AMD) if processor.is_amd and blocks > 1 else blocks


def _reduces_fastest(iterator: ReductionIterator) -> bool:
    reduced = iterator.reduced_dimensions
    strides = iterator.input.strides
    return not strides or reduced == len(strides) or (reduced > 0 and strides[0] < strides[reduced])


def _fastest_stride(iterator: ReductionIterator, along_input: bool) -> int:
    strides = iterator.input.strides
    if not strides:
        return 0
    return strides[0 if along_input else iterator.reduced_dimensions]


def _outputs_at_once(iterator: ReductionIterator, value_bytes: int) -> int:
    """Return how many neighbouring results (4, 2 or 1) a thread loads at once, by address, size and strides."""
    dimension = iterator.reduced_dimensions
    others = (s // value_bytes for i, s in enumerate(iterator.input.strides) if i != dimension)
    vector = 4
    for number in (iterator.offset, iterator.shape[dimension], *others):
        while number % vector:
            vector //= 2
    return vector


def _block(columns: int, rows: int, threads: int, warp: int) -> tuple[int, int]:
    """Return width and height of a block, powers of two."""
    width, height = (min(threads, 1 << (max(size, 1).bit_length() - 1)) for size in (columns, rows))
    narrow = min(width, warp)
    height = min(height, threads // narrow)
    return min(width, threads // height), height


Chooser = Callable[[torch.dtype, torch.dtype], Kernel]


def _opmath(input_: torch.dtype, output: torch.dtype, *, vector_16: int = 4) -> Kernel:
    """Return the kernel whose accumulator is the compute type of the input (fp32 for 16-bit floats)."""
    vector = vector_16 if input_.itemsize == 2 else 4
    keeps = not (input_ == output and input_ in (torch.float16, torch.bfloat16))
    return Kernel(compute_type(input_).itemsize, input_.itemsize, vector, keeps)


def _opmath_wide(input_: torch.dtype, output: torch.dtype) -> Kernel:
    """Return ``_opmath`` with 16-bit values read eight at a time (ReduceSumProdKernel.cu, ReduceMomentKernel.cu)."""
    return _opmath(input_, output, vector_16=8)


def sum_kernel(dtype: torch.dtype) -> Kernel:
    """Return the kernel that sums values of a type into the same type."""
    return _opmath_wide(dtype, dtype)


def _same(input_: torch.dtype, output: torch.dtype) -> Kernel:
    """Return the kernel whose accumulator has the input's type (ReduceMaxValuesKernel.cu, ReduceLogicKernel.cu)."""
    return Kernel(input_.itemsize, input_.itemsize)


def _value_and_index(input_: torch.dtype, output: torch.dtype) -> Kernel:
    """Return the kernel that accumulates a value and a 64-bit index.

    Sources: ReduceArgMaxKernel.cu, ReduceMaxValuesKernel.cu.
    """
    return Kernel(16, input_.itemsize, keeps_in_output=False)


def _welford(input_: torch.dtype, output: torch.dtype) -> Kernel:
    """Return the kernel that accumulates Welford's (mean, m2, 32-bit count, count) (ReduceMomentKernel.cu)."""
    return Kernel(4 * compute_type(input_).itemsize, input_.itemsize, vector=2, keeps_in_output=False)


def reduction(choose: Chooser, *, casts: bool) -> Rule:
    """Return the rule of a reduction operator.

    ``casts``: the input is first converted to the result's type, unless it is a 16-bit float that is summed into fp32.
    """

    def rule(call: KernelCall) -> Plan:
        self = bound(call)["self"]
        result = call.outputs[0]
        dtype = _input_type(self, result) if casts else self.dtype
        plan: list[Out | Scratch | Free] = [Out(index) for index in range(len(call.outputs))]
        if dtype != self.dtype:
            plan.append(Scratch(dense_bytes(self, dtype), "input in the result's type"))
        offset = self.storage_offset() if dtype == self.dtype else 0
        sizes = tuple([output.dtype.itemsize for output in call.outputs])
        layout = InputGeometry(tuple(self.shape), tuple(_strides(self, dtype)), dtype.itemsize, offset)
        iterator = reduction_iterator(layout, _reduced(call, self), sizes)
        return plan + reduction_scratch(iterator, choose(dtype, result.dtype), call.processor, result.dtype.itemsize)

    return rule


def _input_type(self: torch.Tensor, result: torch.Tensor) -> torch.dtype:
    """Return the type that is reduced (aten/src/ATen/native/ReduceOpsUtils.h, ``make_reduction_from_ty``)."""
    if self.dtype in (torch.float16, torch.bfloat16) and result.dtype == torch.float32:
        return self.dtype
    return result.dtype


def _strides(self: torch.Tensor, dtype: torch.dtype) -> Sequence[int]:
    """Return the strides of the input, or of its converted copy, which is dense in the same order."""
    return self.stride() if dtype == self.dtype else torch.empty_like(self, dtype=dtype, device="meta").stride()


def _reduced(call: KernelCall, self: torch.Tensor) -> tuple[bool, ...]:
    """Return which dimensions of ``self`` are reduced: all of them where none is named."""
    dims = bound(call).get("dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return (True,) * self.dim()
    named = {dim % max(self.dim(), 1) for dim in (dims if isinstance(dims, list | tuple) else (dims,))}
    return tuple([dim in named for dim in range(self.dim())])


SUM = reduction(_opmath_wide, casts=True)
PRODUCT = reduction(_opmath, casts=True)
NORM = reduction(_opmath, casts=False)
EXTREMUM = reduction(_same, casts=False)
EXTREMUM_WITH_INDEX = reduction(_value_and_index, casts=False)
MOMENTS = reduction(_welford, casts=True)
LOGICAL = reduction(_same, casts=False)


def extremum(call: KernelCall) -> Plan:
    """Plan ``max`` and ``min``: over all, along a dimension (with the indices), or of two tensors (elementwise)."""
    if "other" in bound(call):
        return [Out(0)]
    return (EXTREMUM_WITH_INDEX if len(call.outputs) > 1 else EXTREMUM)(call)
