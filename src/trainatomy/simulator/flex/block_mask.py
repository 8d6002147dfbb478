"""``create_block_mask`` compiled, and which blocks of scores a mask keeps.

The kernels of a compiled ``create_block_mask`` never write the mask of all queries and keys: they count in each block
of 128 × 128 how many it keeps, and list the blocks of each row and of each column.

Source: torch 2.9-2.13, torch/nn/attention/flex_attention.py (``create_block_mask``); buffers and order as in wrappers
that Inductor of 2.11, 2.12 and 2.13 wrote.  Masks of a single row of blocks have some buffers of a few bytes less.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.catalog.versions import Version, behaviour
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.operators.allocation.plan import ceil_div
from trainatomy.simulator.flex.attention import Tuning

Values = Callable[[Tensor], Tensor | None]
_POINTS = 8
"""Points of a block in each direction at which a mask is evaluated: its first, its last and some between."""
_UNROLLED = 8
"""Blocks in a row from which sums over them are reductions (``unroll_reductions_threshold``)."""
_COUNTS = "counts"
"""Kernel with one setting, which is not tried: the loop over the scores of a block."""
_FUSED_SORT = 512
"""Blocks in a row that a fused kernel sorts (``ir.Sort``)."""


def create(
    mask_mod: Any,
    shape: tuple[int, int, int, int],
    block: tuple[int, int],
    *,
    separates_full: bool,
    version: Version,
    tuning: Tuning,
) -> Any:
    """Return the block mask that a compiled ``create_block_mask`` makes, of tensors without values.

    Args:
        mask_mod: The mask as a function of indices.
        shape: Batch size of the mask, its heads, queries and keys.
        block: Queries and keys of a block.
        separates_full: Blocks that are kept whole are listed apart.
        version: Release of PyTorch.
        tuning: First calls of kernels.
    """
    batch, heads, queries, keys = shape
    rows, columns = ceil_div(queries, block[0]), ceil_div(keys, block[1])
    lists = 2 if separates_full else 1
    is_sorted_by_aten = behaviour("compiled_block_mask_sorts_with_aten", version) or max(rows, columns) > _FUSED_SORT
    make = _with_aten_sort if is_sorted_by_aten else _fused
    found = make(batch, heads, rows, columns, lists, partial(_run, tuning))
    some, full = found[0], found[1] if separates_full else (None, None, None, None)
    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=some[0],
        kv_indices=some[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=some[2],
        q_indices=some[3],
        full_q_num_blocks=full[2],
        full_q_indices=full[3],
        BLOCK_SIZE=block,
        mask_mod=mask_mod,
    )


Lists = tuple[Tensor, Tensor, Tensor, Tensor]
"""Number of blocks in each row, their columns; number of blocks in each column, their rows."""


Kernel = Callable[..., list[Tensor]]
"""``_run`` with the first calls of kernels."""


def _run(tuning: Tuning, name: str, *sizes: tuple[int, ...], dtype: torch.dtype = torch.int32) -> list[Tensor]:
    """Allocate what a kernel writes to."""
    with one_operation("inductor::kernel", bytes=None) as results:
        made = [torch.empty(size, dtype=dtype, device="cuda") for size in sizes]
        results.extend(made)
    if name != _COUNTS:
        tuning.call(f"{name} of a mask", *made)
    return made


def _fused(batch: int, heads: int, rows: int, columns: int, lists: int, kernel: Kernel) -> list[Lists]:
    """Allocate what kernels that sort themselves do."""
    counts = kernel(_COUNTS, (batch, heads, rows, columns), dtype=torch.int64)
    dense = kernel("matrix", *[(batch, heads, rows, columns + 1)] * lists)
    by_row = kernel("rows", *[(batch, heads, rows)] * lists, *[(batch, heads, rows, columns)] * lists)
    del counts
    size, number = (batch, heads, columns, rows), (batch, heads, columns)
    is_short = max(rows, columns) < _UNROLLED
    sorted_first = kernel("columns", *[size] * lists) if is_short else []
    found: list[Lists] = []
    for each in range(lists):
        row, of_column = (
            (sorted_first[each], *kernel("numbers", number)) if is_short else kernel("columns", size, number)
        )
        dense.pop(0 if min(rows, columns) < _UNROLLED else -1)
        found.append((by_row[each], by_row[lists + each], of_column, row))
    return found


def _with_aten_sort(batch: int, heads: int, rows: int, columns: int, lists: int, kernel: Kernel) -> list[Lists]:
    """Allocate what kernels do between which ``aten::sort`` sorts; it is written over the blocks in the end."""
    dense = kernel("matrix", *[(batch, heads, rows, columns + 1)] * lists)
    blocks = kernel(_COUNTS, *[(batch, heads, rows, columns)] * lists)
    if max(rows, columns) < _UNROLLED:
        return _with_aten_sorts_last(batch, heads, rows, columns, dense, blocks, kernel)
    found: list[Lists] = []
    for _ in range(lists):
        unsorted = blocks.pop(0)
        order = _sort(unsorted)
        number, index = kernel("rows", (batch, heads, rows), (batch, heads, rows, columns))
        del order
        (of_column,) = kernel("numbers", (batch, heads, columns))
        dense.pop(0)
        _sort(unsorted.transpose(-2, -1))
        found.append((number, index, of_column, unsorted.view(batch, heads, columns, rows)))
    return found


def _with_aten_sorts_last(
    batch: int, heads: int, rows: int, columns: int, dense: list[Tensor], blocks: list[Tensor], kernel: Kernel
) -> list[Lists]:
    """Allocate the same where sums over a row are no reductions: the lists of rows are written over the blocks."""
    numbers = kernel("rows", *[(batch, heads, rows)] * len(blocks))
    by_column = []
    for each in blocks:
        _sort(each)
        (transposed,) = kernel("columns", (batch, heads, columns, rows))
        dense.pop(0)
        by_column.append((transposed, *kernel("numbers", (batch, heads, columns))))
    for transposed, _ in by_column:
        _sort(transposed)
    return [
        (number, index, of_column, row)
        for number, index, (row, of_column) in zip(numbers, blocks, by_column, strict=True)
    ]


def _sort(blocks: Tensor) -> Tensor:
    return torch.sort(blocks, stable=True, descending=True)[1]


def kept_share(mask: Any, values: Values) -> float | None:
    """Return the share of the blocks of a mask that are not all masked; None if it depends on unknown values.

    The mask is evaluated at some points of each block, its corners among them, on the host.

    Args:
        mask: A block mask.
        values: Returns the values of a tensor where they are known.
    """
    block_queries, block_keys = mask.BLOCK_SIZE
    batch, heads = mask.kv_num_blocks.shape[:2]
    queries, keys = mask.seq_lengths
    if block_queries >= queries and block_keys >= keys:
        return 1.0
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            function = _on_host(mask.mask_mod, values)
            rows, columns = _points(queries, block_queries), _points(keys, block_keys)
            found = function(
                torch.arange(batch).view(-1, 1, 1, 1),
                torch.arange(heads).view(1, -1, 1, 1),
                rows.view(1, 1, -1, 1),
                columns.view(1, 1, 1, -1),
            )
            found = found.expand(batch, heads, len(rows), len(columns))
        except (_UnknownError, RuntimeError, IndexError, TypeError, ValueError):
            return None
        shape = (batch, heads, len(rows) // _POINTS, _POINTS, len(columns) // _POINTS, _POINTS)
        return float(found.reshape(shape).any(-1).any(3).float().mean())


class _UnknownError(Exception):
    """A tensor that a mask uses has no known values."""


def _points(length: int, block: int) -> Tensor:
    """Return positions in all blocks of a length; a last block that is not full has its last position repeated."""
    starts = torch.arange(ceil_div(length, block)) * block
    within = torch.linspace(0, block - 1, _POINTS).round().long()
    return (starts[:, None] + within).clamp(max=length - 1).flatten()


def _on_host(function: Any, values: Values) -> Any:
    """Return a function whose tensors on the GPU, in its closure and in functions there, have their values."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    cells = tuple(types.CellType(_value(cell.cell_contents, values)) for cell in function.__closure__)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _value(content: Any, values: Values) -> Any:
    if isinstance(content, Tensor):
        found = values(content) if content.is_meta else content
        if found is None:
            raise _UnknownError
        return found
    if isinstance(content, (tuple, list)):
        return type(content)(_value(each, values) for each in content)
    return _on_host(content, values)


def captured(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors that a function and the functions in its closure refer to, with their names."""
    for name, cell in zip(
        getattr(getattr(function, "__code__", None), "co_freevars", ()),
        getattr(function, "__closure__", None) or (),
        strict=False,
    ):
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        for each in content if isinstance(content, (tuple, list)) else (content,):
            if isinstance(each, Tensor):
                yield name, each
            elif isinstance(each, types.FunctionType):
                yield from captured(each)
