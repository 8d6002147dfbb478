"""Find matrix products whose shapes waste the GPU: misaligned dimensions, and results that leave multiprocessors idle.

Source: NVIDIA, "Matrix Multiplication Background User's Guide" (deep learning performance documentation):

- Tensor cores are used best if m, n and k are multiples of 16 bytes (8 elements of 16 bits, 4 of TF32), on A100 of
  128 bytes (64 and 32), section "Tensor Core Requirements".  Assumed for every GPU since (capability 8.0 and above).
- The result is cut into tiles.  A tile that extends beyond the edge is computed in full (tile quantisation), and tiles
  are computed in waves of one per multiprocessor, the last of which may be nearly empty (wave quantisation).  The
  library chooses among tiles from 256x128 to 64x64; the best one is assumed, so the loss reported is a lower bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from trainatomy.analysis.memory import fold_layers
from trainatomy.analysis.operation_table import OperationTable
from trainatomy.results.operation_breakdown import WastefulShape
from trainatomy.results.operations import Array, Call

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_BYTES_NEEDED, _BYTES_BEST = 16, 128
MIN_FLOP_SHARE, WELL_USED = 0.001, 0.9
"""Products with a smaller share of the step's FLOP than the first, or that use more of the GPU than the second, are not
reported."""


class Product(NamedTuple):
    """A batch of matrix products [m, k] x [k, n]; ``itemsize``: bytes of an element."""

    batch: int
    m: int
    n: int
    k: int
    itemsize: int


def product_of(call: Call) -> Product | None:
    """Return the product that a call of mm, addmm, bmm or baddbmm computes, ``None`` for other operators."""
    matrices = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
    places = matrices.get(call.name)
    if places is None:
        return None
    first, second = (call.inputs[place] for place in places)
    batch = first.shape[0] if len(first.shape) == 3 else 1
    return Product(batch, first.shape[-2], second.shape[-1], first.shape[-1], first.itemsize)


def wasteful_shapes(
    table: OperationTable, capability: tuple[int, int], multiprocessors: int, tf32: bool = False
) -> tuple[WastefulShape, ...]:
    """Return the products on tensor cores that leave part of the GPU unused, by module, the most wasteful first.

    Args:
        table: The operations of a step.
        capability: Compute capability of the GPU.
        multiprocessors: Number of its multiprocessors.
        tf32: Whether fp32 products may use tensor cores, as 16-bit products do.
    """
    calls: dict[tuple[int, str, str], int] = defaultdict(int)
    for _, operation, work in table.kernels():
        if work.group == "contraction":
            calls[operation.call, fold_layers(operation.module, root=True), operation.phase] += operation.repeats
    whole = table.total().flop or 1
    found: list[WastefulShape] = []
    for (index, module, phase), count in calls.items():
        call = table.operations.calls[index]
        product = product_of(call)
        if product is None or not _on_tensor_cores(call, capability, tf32):
            continue
        share = (call.flop or 0) * count / whole
        if share >= MIN_FLOP_SHARE:
            base = WastefulShape(
                "", call.name, module, phase, count, (product.batch, *product[1:4]), "", 0, 0, 0, 1.0, share
            )
            found += [*_alignment(product, base, capability), *_quantisation(product, base, multiprocessors)]
    return tuple(sorted(_merged(found), key=lambda shape: -shape.flop_share * (1.05 - shape.used)))


def _on_tensor_cores(call: Call, capability: tuple[int, int], tf32: bool) -> bool:
    dtype = call.inputs[0].dtype
    if dtype == "float16":
        return capability >= (7, 0)
    return (dtype == "bfloat16" or (dtype == "float32" and tf32)) and capability >= (8, 0)


def _alignment(product: Product, base: WastefulShape, capability: tuple[int, int]) -> Iterator[WastefulShape]:
    needed = _BYTES_NEEDED // product.itemsize
    best = (_BYTES_BEST if capability >= (8, 0) else _BYTES_NEEDED) // product.itemsize
    for name, size in zip("mnk", product[1:4], strict=True):
        if size % best:
            multiple = needed if size % needed else best
            padded = _up(size, multiple)
            kind = "alignment" if size % needed else "best alignment"
            yield replace(
                base, kind=kind, dimension=name, size=size, multiple=multiple, padded=padded, used=size / padded
            )


def _quantisation(product: Product, base: WastefulShape, multiprocessors: int) -> Iterator[WastefulShape]:
    used, tile = max((_used(product, tile, multiprocessors), tile) for tile in TILES)
    if used >= WELL_USED:
        return
    tiles = _tiles(product, tile)
    full = _up(tiles, multiprocessors)
    inside = product.batch * product.m * product.n / (tiles * tile[0] * tile[1])
    kind = "waves" if tiles / full <= inside else "tiles"
    dimension = f"{tile[0]}x{tile[1]}"
    yield replace(base, kind=kind, dimension=dimension, size=tiles, multiple=multiprocessors, padded=full, used=used)


def _tiles(product: Product, tile: tuple[int, int]) -> int:
    return product.batch * -(-product.m // tile[0]) * -(-product.n // tile[1])


def _used(product: Product, tile: tuple[int, int], multiprocessors: int) -> float:
    """Return the share of the work done in whole waves of tiles that is part of the result."""
    computed = _up(_tiles(product, tile), multiprocessors) * tile[0] * tile[1]
    return product.batch * product.m * product.n / computed


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _merged(shapes: list[WastefulShape]) -> list[WastefulShape]:
    """Merge calls that differ only in addresses or strides, which are not shown."""
    found: dict[WastefulShape, WastefulShape] = {}
    for shape in shapes:
        key = replace(shape, calls=0, flop_share=0.0)
        known = found.get(key)
        found[key] = (
            shape
            if known is None
            else replace(known, calls=known.calls + shape.calls, flop_share=known.flop_share + shape.flop_share)
        )
    return list(found.values())


def with_gains(
    shapes: tuple[WastefulShape, ...], table: OperationTable, gpu_seconds: Callable[[Call], float]
) -> tuple[WastefulShape, ...]:
    """Add ``gain_seconds`` to the shapes with a dimension that can be padded, and sort by it.

    Args:
        shapes: The shapes.
        table: The operations they are from.
        gpu_seconds: Predicts the GPU seconds of a call.
    """
    by_shape = calls_by_shape(table)
    found = [_with_gain(shape, by_shape.get((shape.operation, shape.shape)), gpu_seconds) for shape in shapes]
    return tuple(sorted(found, key=lambda shape: -(shape.gain_seconds or 0.0)))


def calls_by_shape(table: OperationTable) -> dict[tuple[str, tuple[int, int, int, int]], Call]:
    """Return a call of each operator and shape (batch, m, n, k), as in ``WastefulShape``.

    If several differ only in types or strides, it is the last of them.
    """
    found = {}
    for call in table.operations.calls:
        product = product_of(call)
        if product is not None:
            found[call.name, (product.batch, *product[1:4])] = call
    return found


def _with_gain(shape: WastefulShape, call: Call | None, gpu_seconds: Callable[[Call], float]) -> WastefulShape:
    if call is None or shape.dimension not in ("m", "n", "k"):
        return shape
    saved = gpu_seconds(call) - gpu_seconds(padded_call(call, shape.dimension, shape.padded))
    return replace(shape, gain_seconds=saved * shape.calls)


def padded_call(call: Call, dimension: str, size: int) -> Call:
    """Return the product with another size of ``dimension`` (m, n or k), its matrices dense and in the same layout.

    Raises:
        ValueError: If the call is not a matrix product.
    """
    product = product_of(call)
    if product is None:
        raise ValueError(f"{call.name} is not a product of two matrices with dimensions m, n and k")
    bias = call.name in ("aten::addmm", "aten::baddbmm")
    sizes = {**product._asdict(), dimension: size}
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    written = len(call.inputs) - bias - 2  # torch.mm(a, b, out=c) names its output last
    shapes = [(m, n)] * bias + [(m, k), (k, n)] + [(m, n)] * written
    inputs = [_resized(array, shape) for array, shape in zip(call.inputs, shapes, strict=True)]
    outputs = tuple(_resized(array, (m, n)) for array in call.outputs)
    flop = 2 * product.batch * m * n * k
    return call._replace(inputs=tuple(inputs), outputs=outputs, flop=flop)


def _resized(array: Array, matrix: tuple[int, int]) -> Array:
    """Return the array with matrices of another shape: dense, and transposed if they were; or a row for a bias."""
    if len(array.shape) == 1:
        return array._replace(shape=matrix[1:])
    rows, columns = matrix
    transposed = array.strides[-2] == 1 and array.strides[-1] != 1
    last = (1, rows) if transposed else (columns, 1)
    batch = array.shape[:-2]
    strides = (rows * columns, *last) if batch else last
    return array._replace(shape=(*batch, rows, columns), strides=strides)
